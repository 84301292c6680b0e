"""Changes an unpacked source tree of Horovod 0.28.1, and fails if it is another version.

Usage: python launch/patch_horovod.py SOURCE

The comment above each change explains the problem without it.
"""

import pathlib
import sys

# (file, text, replacement). The text must occur exactly once. An empty text means the whole file,
# and "$" its end.
CHANGES = [
    # This file has only the XLA operations, which are off by default. It does not compile with
    # TensorFlow's headers.
    ("horovod/tensorflow/xla_mpi_ops.cc", "", ""),
    # Since GCC 13 other headers no longer include these, so std::logic_error and std::string are
    # not declared.
    (
        "horovod/common/common.h",
        "#include <memory>\n#include <string>\n",
        "#include <memory>\n#include <stdexcept>\n#include <string>\n",
    ),
    (
        "horovod/common/group_table.h",
        "#include <queue>\n#include <unordered_map>\n",
        "#include <queue>\n#include <string>\n#include <unordered_map>\n",
    ),
    # TensorFlow no longer exports the function that returns the CUDA handle of a stream, so a GPU
    # build links but cannot be loaded. Define the function; a method of the stream has the handle.
    (
        "horovod/tensorflow/mpi_ops.cc",
        "$",
        """
#if HAVE_GPU
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif
""",
    ),
    # horovodrun imports TensorFlow in another process to ask for the features of the library, which
    # takes seconds at each start. launch/horovod_wheel.sh always builds it with MPI, without which
    # the build fails, and without Gloo.
    *(
        (
            "horovod/common/util.py",
            f"""def {name}_built(verbose=False):
    for ext_base_name in EXTENSIONS:
        built_fn = lambda ext: ext.{name}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {title}', verbose)
        if result is not None:
            return result
    return None
""",
            f"def {name}_built(verbose=False):\n    return {built}\n",
        )
        for name, title, built in (("mpi", "MPI", True), ("gloo", "Gloo", False))
    ),
    # horovodrun reports user errors (an unknown host, a wrong -H, a missing hostfile) with a
    # traceback. Print one line instead, and the traceback only with --verbose.
    (
        "horovod/runner/launch.py",
        """    ssh_successful_to_all_hosts = True
    for index, ssh_status in ssh_exit_codes.items():
        exit_code, output_msg = ssh_status[0], ssh_status[1]
        if exit_code != 0:
            print('ssh not successful for host {host}:\\n{msg_output}'
                  .format(host=host_addresses[index],
                          msg_output=output_msg))

            ssh_successful_to_all_hosts = False
    if not ssh_successful_to_all_hosts:
        return None  # we could return False here but do not want it to be cached
""",
        """    refused = [(host_addresses[index], ' '.join(status[1].split()))
               for index, status in ssh_exit_codes.items() if status[0] != 0]
    if refused:
        raise RuntimeError('; '.join(
            '{0} is out of reach ({1}): check -H, and that `ssh {0} true` works'.format(host, reason)
            for host, reason in refused))
""",  # noqa: E501
    ),
    (
        "horovod/runner/launch.py",
        """        logging.basicConfig(level=logging.getLevelName(args.log_level))

    _run(args)
""",
        """        logging.basicConfig(level=logging.getLevelName(args.log_level))

    try:
        _run(args)
    except (OSError, RuntimeError, ValueError) as error:
        if args.verbose:
            raise
        sys.exit('error: ' + ' '.join(str(error).split()))
""",
    ),
]


def main(source: pathlib.Path) -> None:
    """Changes the files.

    Raises:
      SystemExit: With one line if a file does not have the expected text.
    """
    for name, text, replacement in CHANGES:
        path = source / name
        content = path.read_text() if path.exists() else ""
        if not content or (text not in ("", "$") and content.count(text) != 1):
            raise SystemExit(
                f"error: {name} is not as in Horovod 0.28.1, so it cannot be changed. Use that"
                " version."
            )
        if text == "$":
            content += replacement
        else:
            content = content.replace(text, replacement) if text else replacement
        path.write_text(content)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
