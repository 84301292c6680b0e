"""python launch/mend_horovod.py SOURCE: alters an unpacked source tree of Horovod 0.28.1, and fails if it is another.

Each change says what goes wrong without it. Horovod built without those to Gloo and to its thread works too, but not
elastically: see docs/elastic.md.
"""

import pathlib
import sys

# (file, text, replacement); the text must occur once. An empty text stands for the whole file, "$" for its end.
CHANGES = [
    # Only the XLA operations, which are off by default; does not compile against TensorFlow's headers.
    ("horovod/tensorflow/xla_mpi_ops.cc", "", ""),
    # GCC 13 and newer no longer bring these headers along with others: std::logic_error and std::string are unknown.
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
    # TensorFlow no longer exports the function that gives a stream's CUDA handle, so a GPU build links and then does
    # not load. The stream's own interface has the handle; define the function with it.
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
    # The contexts of process sets are never marked as enabled, so they kept their connections after a shutdown. A rank
    # that did not talk to the lost one itself then waited for the full time-out.
    (
        "horovod/common/gloo/gloo_context.cc",
        "void GlooContext::Finalize() {\n  if (!enabled_) {\n    return;\n  }\n",
        "void GlooContext::Finalize() {\n",
    ),
    # A rank whose host was taken from the job must leave; the exception ended it with an abort and a core dump.
    (
        "horovod/common/gloo/gloo_context.cc",
        "      throw std::runtime_error(out.str());",
        "      LOG(INFO) << out.str();\n      std::_Exit(0);",
    ),
    # A rank that is lost while the others connect ended them all: the exception left the thread. Now `init` fails, and
    # can be called again after a shutdown.
    (
        "horovod/common/operations.cc",
        "bool RunLoopOnce(HorovodGlobalState& state);\n\nvoid BackgroundThreadLoop(",
        """bool RunLoopOnce(HorovodGlobalState& state);

void BackgroundThreadLoop(HorovodGlobalState& state);

void GuardedBackgroundThreadLoop(HorovodGlobalState& state) {
  try {
    BackgroundThreadLoop(state);
  } catch (const std::exception& ex) {
    LOG(DEBUG) << "Horovod's thread ended: " << ex.what();
    state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
#if HAVE_GLOO
    global_gloo_context.Finalize();
#endif
    state.initialization_failed = true;
  }
}

void BackgroundThreadLoop(""",
    ),
    (
        "horovod/common/operations.cc",
        """    horovod_global.initialization_done = false;
    horovod_global.background_thread =
        std::thread(BackgroundThreadLoop, std::ref(horovod_global));""",
        """    horovod_global.initialization_done = false;
    horovod_global.initialization_failed = false;
    horovod_global.background_thread =
        std::thread(GuardedBackgroundThreadLoop, std::ref(horovod_global));""",
    ),
    # A second error on a connection that is closed already ended the process. And a receiver whose message had begun to
    # arrive was not told of the error: it waited for the full time-out.
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "void Pair::signalException(std::exception_ptr ex) {\n  GLOO_ENFORCE(ex_ == nullptr);\n",
        """void Pair::signalException(std::exception_ptr ex) {
  if (ex_ != nullptr) {
    return;
  }
  if (rx_.ubuf) {
    NonOwningPtr<UnboundBuffer> arriving(rx_.ubuf);
    if (arriving) {
      arriving->signalException(ex);
    }
  }
""",
    ),
    # horovodrun imports TensorFlow, in a process of its own, to learn what the library was built with: seconds at each
    # start. launch/horovod_wheel.sh demands MPI and Gloo, without which the build fails.
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
            f"def {name}_built(verbose=False):\n    return True\n",
        )
        for name, title in (("mpi", "MPI"), ("gloo", "Gloo"))
    ),
    # What horovodrun refuses (an unknown host, bad -H, a missing hostfile) it told in a traceback, which is
    # left to --verbose now.
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
""",
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
    """Alters the files; SystemExit with one line if a text is not there."""
    for name, text, replacement in CHANGES:
        path = source / name
        content = path.read_text() if path.exists() else ""
        if not content or (text not in ("", "$") and content.count(text) != 1):
            raise SystemExit(f"error: {name} is not as in Horovod 0.28.1: the changes do not fit this version")
        if text == "$":
            content += replacement
        else:
            content = content.replace(text, replacement) if text else replacement
        path.write_text(content)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
