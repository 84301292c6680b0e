"""MLPerf's reference convergence points for ResNet-50 with LARS (rcps_resnet.json 4.0.0).

They were typed in from the file. Columns: batch, mean epochs to 75.9 %, base learning rate, warmup
epochs, momentum, weight decay, epoch at which the schedule reaches 0, relative step lr * 0.001 / (1
- momentum) at the peak, model_bn_span.
"""

POINTS = """
 1632 35.0  7.4     2 .9      5e-5   35.0 .074 204
 3264 35.2 10.5     2 .9      5e-5   37.0 .105 204
 4096 40.0 10       5 .9      2e-4   42.0 .100 64
 8192 42.0 17       5 .9      2e-4   44.0 .170 64
13056 45.4 12.8     9 .9      2.5e-5 48.0 .128 204
32768 56.0 21.2    16 .94     2.5e-5 58.0 .353 128
49152 68.0 19.405  24 .951807 1e-4   70.8 .403 256
58880 79.9 23.246  29 .951807 1e-4   82.0 .482 230
65536 84.5 24.699  31 .951807 1e-4   89.0 .512 128
67840 85.9 24.699  31 .951807 1e-4   91.0 .512 424
"""

ROWS = [tuple(map(float, line.split())) for line in POINTS.strip().splitlines()]
