// Times cuDNN's fused engines for the convolutions of ResNet-50 next to the kernels that the step runs today.
//
//   cudnn_probe LAYERS [--batch=256] [--runs=20] [--plans=4] [--dry-run]
//
// LAYERS is resnet50.txt. dev/cudnn_probe.sh compiles and runs this program. It contains no device code, so g++ is
// enough. With --dry-run, and where there is no GPU, it validates the graph of each pattern and shape, and prints them.
// That does not show whether cuDNN has an engine for a pattern: only a GPU does.
//
// Forward, a fused layer reads the raw output of the convolution before it, and the scale and bias that follow from its
// statistics. It writes its own raw output and the sums of its values and their squares. Backward, it reads the
// gradient of its raw output and writes the gradient of the raw output before it. Where no engine exists for a fused
// pattern, or it is slower, the separate passes with the same inputs and outputs count instead.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <cudnn_frontend.h>

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr int kExitUsage = 2;
// The custom operation is worth its upkeep if the step becomes this much shorter.
constexpr double kWorthwhileMs = 3.0;
constexpr int kWarmupRuns = 3;
// Assumed time of computing scale and bias from the sums, if cuDNN has no engine for that.
constexpr double kFinalizeMs = 0.02;
// Larger than the L2 cache of an H200 (50 MB), so that each run reads its inputs from memory, as in a step.
constexpr size_t kFlushBytes = size_t{256} << 20;
// Largest sum of tensors of one pattern: five of 411 MB for the backward pass of a join with 256 images.
constexpr size_t kArenaBytesPerImage = size_t{10} << 20;
constexpr size_t kRandomBytes = size_t{64} << 20;
constexpr size_t kAlignment = 256;
constexpr double kEpsilon = 1e-5;

struct Options {
    std::string layers;
    int64_t batch = 256;
    int runs = 20;
    int plans = 4;
    bool dry_run = false;
};

struct Layer {
    std::string name;
    int64_t count, channels, side, filters, kernel, stride;
    std::string input, output;

    int64_t pad() const { return kernel / 2; }
    int64_t out_side() const { return (side + 2 * pad() - kernel) / stride + 1; }
    bool is_normalized() const { return input == "normalized"; }
};

// The convolution that runs for a layer. The stem runs as 4 x 4 blocks of 2 x 2 pixels, see models/kernels.py.
struct Convolution {
    int64_t batch, channels, side, filters, kernel, stride, pad, out_side;

    Convolution(const Layer& layer, int64_t images)
        : batch(images),
          channels(layer.channels),
          side(layer.side),
          filters(layer.filters),
          kernel(layer.kernel),
          stride(layer.stride),
          pad(layer.pad()),
          out_side(layer.out_side()) {
        if (kernel == 7) {
            channels = 16;
            side = side / 2 + 3;
            kernel = 4;
            stride = 1;
            pad = 0;
        }
    }
};

void check(cudaError_t status, const char* call) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

void check(cudnnStatus_t status, const char* call) {
    if (status != CUDNN_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(call) + ": " + cudnnGetErrorString(status));
    }
}

#define CHECK(call) check((call), #call)

// One graph of cuDNN, with the size of each tensor that is in memory. All tensors are NHWC.
class Pattern {
   public:
    explicit Pattern(fe::DataType_t intermediate) {
        graph_.set_io_data_type(fe::DataType_t::HALF)
            .set_intermediate_data_type(intermediate)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    fe::graph::Graph& graph() { return graph_; }
    const std::vector<std::pair<Tensor, size_t>>& stored() const { return stored_; }

    Tensor input(int64_t n, int64_t c, int64_t h, int64_t w, fe::DataType_t type = fe::DataType_t::HALF) {
        auto tensor = graph_.tensor(fe::graph::Tensor_attributes()
                                        .set_name("input" + std::to_string(stored_.size()))
                                        .set_dim({n, c, h, w})
                                        .set_stride({c * h * w, 1, c * w, c})
                                        .set_data_type(type));
        remember(tensor, n * c * h * w, type);
        return tensor;
    }

    Tensor images(int64_t n, int64_t c, int64_t side) { return input(n, c, side, side); }

    Tensor vector(int64_t c, fe::DataType_t type = fe::DataType_t::FLOAT) { return input(1, c, 1, 1, type); }

    void output(const Tensor& tensor, int64_t n, int64_t c, int64_t h, int64_t w,
                fe::DataType_t type = fe::DataType_t::HALF) {
        tensor->set_output(true).set_data_type(type).set_dim({n, c, h, w}).set_stride({c * h * w, 1, c * w, c});
        remember(tensor, n * c * h * w, type);
    }

    void output_vector(const Tensor& tensor, int64_t c) { output(tensor, 1, c, 1, 1, fe::DataType_t::FLOAT); }

    // Stores a vector in the type that cuDNN chooses, which is at most FP32.
    void untyped_output_vector(const Tensor& tensor, int64_t c) {
        tensor->set_output(true);
        remember(tensor, c, fe::DataType_t::FLOAT);
    }

    Tensor pointwise(fe::PointwiseMode_t mode, const Tensor& a, const Tensor& b) {
        return graph_.pointwise(a, b, fe::graph::Pointwise_attributes().set_mode(mode));
    }

    Tensor relu(const Tensor& a) {
        return graph_.pointwise(a, fe::graph::Pointwise_attributes().set_mode(fe::PointwiseMode_t::RELU_FWD));
    }

    // Normalizes by scale and bias. cuDNN's prologues take them in the type of the images.
    Tensor scale_bias(const Tensor& x, int64_t c) {
        auto scaled = pointwise(fe::PointwiseMode_t::MUL, x, vector(c, fe::DataType_t::HALF));
        return pointwise(fe::PointwiseMode_t::ADD, scaled, vector(c, fe::DataType_t::HALF));
    }

    void statistics(const Tensor& x, int64_t c) {
        auto [sum, squares] = graph_.genstats(
            x, fe::graph::Genstats_attributes().set_compute_data_type(fe::DataType_t::FLOAT));
        output_vector(sum, c);
        output_vector(squares, c);
    }

   private:
    void remember(const Tensor& tensor, int64_t size, fe::DataType_t type) {
        stored_.emplace_back(tensor, static_cast<size_t>(size) * (type == fe::DataType_t::HALF ? 2 : 4));
    }

    fe::graph::Graph graph_;
    std::vector<std::pair<Tensor, size_t>> stored_;
};

template <typename Attributes>
Attributes attributes_of(const Convolution& c) {
    return Attributes().set_padding({c.pad, c.pad}).set_stride({c.stride, c.stride}).set_dilation({1, 1});
}

using Build = std::function<void(Pattern&, const Convolution&)>;

Tensor kernel_of(Pattern& p, const Convolution& c) { return p.input(c.filters, c.channels, c.kernel, c.kernel); }

void forward(Pattern& p, const Convolution& c, bool normalizes, bool counts) {
    auto x = p.images(c.batch, c.channels, c.side);
    if (normalizes) x = p.relu(p.scale_bias(x, c.channels));
    auto y = p.graph().conv_fprop(x, kernel_of(p, c), attributes_of<fe::graph::Conv_fprop_attributes>(c));
    p.output(y, c.batch, c.filters, c.out_side, c.out_side);
    if (counts) p.statistics(y, c.filters);
}

void kernel_gradient(Pattern& p, const Convolution& c, bool normalizes) {
    auto x = p.images(c.batch, c.channels, c.side);
    if (normalizes) x = p.relu(p.scale_bias(x, c.channels));
    auto dy = p.images(c.batch, c.filters, c.out_side);
    auto dw = p.graph().conv_wgrad(dy, x, attributes_of<fe::graph::Conv_wgrad_attributes>(c));
    p.output(dw, c.filters, c.channels, c.kernel, c.kernel);
}

Tensor input_gradient(Pattern& p, const Convolution& c) {
    auto dy = p.images(c.batch, c.filters, c.out_side);
    auto dx = p.graph().conv_dgrad(dy, kernel_of(p, c), attributes_of<fe::graph::Conv_dgrad_attributes>(c));
    dx->set_dim({c.batch, c.channels, c.side, c.side});
    return dx;
}

// Gradient of the input, of the ReLU before it, and the sums that the gradient of the normalization before that needs.
void input_gradient_with_sums(Pattern& p, const Convolution& c) {
    auto dx = input_gradient(p, c);
    auto x = p.images(c.batch, c.channels, c.side);
    auto mean = p.vector(c.channels);
    auto inverse_deviation = p.vector(c.channels);
    auto scale = p.vector(c.channels);
    auto bias = p.vector(c.channels);
    // cuDNN 9.28 has an engine for this chain, but none if the mean is added with its sign changed.
    auto centered = p.pointwise(fe::PointwiseMode_t::SUB, x, mean);
    auto normalized = p.pointwise(fe::PointwiseMode_t::MUL, centered, inverse_deviation);
    auto scaled = p.pointwise(fe::PointwiseMode_t::MUL, normalized, scale);
    auto before_relu = p.pointwise(fe::PointwiseMode_t::ADD, scaled, bias);
    auto dz = p.pointwise(fe::PointwiseMode_t::RELU_BWD, dx, before_relu);
    p.output(dz, c.batch, c.channels, c.side, c.side);
    auto sums = p.graph().dbn_weight(dz, x, mean, inverse_deviation, scale, fe::graph::DBN_weight_attributes());
    for (const auto& sum : sums) p.untyped_output_vector(sum, c.channels);
}

// Gradient of a normalization from its sums: a * dz + b * x + c, with a vector for each of a, b and c.
void apply_gradient(Pattern& p, const Convolution& c) {
    auto dz = p.images(c.batch, c.channels, c.side);
    auto x = p.images(c.batch, c.channels, c.side);
    auto first = p.pointwise(fe::PointwiseMode_t::MUL, dz, p.vector(c.channels));
    auto second = p.pointwise(fe::PointwiseMode_t::MUL, x, p.vector(c.channels));
    auto sum = p.pointwise(fe::PointwiseMode_t::ADD, first, second);
    auto dx = p.pointwise(fe::PointwiseMode_t::ADD, sum, p.vector(c.channels));
    p.output(dx, c.batch, c.channels, c.side, c.side);
}

void normalize(Pattern& p, int64_t batch, int64_t channels, int64_t side, bool adds) {
    auto y = p.scale_bias(p.images(batch, channels, side), channels);
    if (adds) y = p.pointwise(fe::PointwiseMode_t::ADD, y, p.images(batch, channels, side));
    p.output(p.relu(y), batch, channels, side, side);
}

// Scale, bias and moving statistics from the sums of a convolution's output.
void finalize(Pattern& p, const Convolution& c) {
    auto sum = p.vector(c.filters);
    auto squares = p.vector(c.filters);
    auto scale = p.vector(c.filters);
    auto bias = p.vector(c.filters);
    auto moving_mean = p.vector(c.filters);
    auto moving_variance = p.vector(c.filters);
    auto momentum = p.graph().tensor(0.1f);
    auto epsilon = p.graph().tensor(static_cast<float>(kEpsilon));
    auto count = p.graph().tensor(c.batch * c.out_side * c.out_side);
    auto attributes =
        fe::graph::BN_finalize_attributes().set_previous_running_stats(moving_mean, moving_variance, momentum);
    for (const auto& result : p.graph().bn_finalize(sum, squares, scale, bias, epsilon, count, attributes)) {
        p.output_vector(result, c.filters);
    }
}

struct Kind {
    const char* name;
    const char* description;
    Build build;
    std::function<bool(const Layer&)> applies;
};

bool always(const Layer&) { return true; }
bool has_gradient(const Layer& layer) { return layer.input != "image"; }
bool is_normalized(const Layer& layer) { return layer.is_normalized(); }
bool is_join(const Layer& layer) { return layer.output == "join"; }

const std::vector<Kind>& kinds() {
    static const std::vector<Kind> all = {
        {"conv", "convolution", [](Pattern& p, const Convolution& c) { forward(p, c, false, false); }, always},
        {"dgrad", "gradient of the input",
         [](Pattern& p, const Convolution& c) {
             p.output(input_gradient(p, c), c.batch, c.channels, c.side, c.side);
         },
         has_gradient},
        {"wgrad", "gradient of the kernel",
         [](Pattern& p, const Convolution& c) { kernel_gradient(p, c, false); }, always},
        {"conv_stats", "convolution + statistics",
         [](Pattern& p, const Convolution& c) { forward(p, c, false, true); }, always},
        {"norm_conv_stats", "scale, bias, ReLU + convolution + statistics",
         [](Pattern& p, const Convolution& c) { forward(p, c, true, true); }, is_normalized},
        {"dgrad_relu_sums", "gradient of the input + of ReLU + sums for that of the normalization",
         input_gradient_with_sums, is_normalized},
        {"norm_wgrad", "scale, bias, ReLU + gradient of the kernel",
         [](Pattern& p, const Convolution& c) { kernel_gradient(p, c, true); }, is_normalized},
        {"stats", "statistics alone",
         [](Pattern& p, const Convolution& c) {
             p.statistics(p.images(c.batch, c.filters, c.out_side), c.filters);
         },
         always},
        {"finalize", "scale, bias and moving statistics from the sums", finalize, always},
        {"norm_in", "scale, bias, ReLU of the input",
         [](Pattern& p, const Convolution& c) { normalize(p, c.batch, c.channels, c.side, false); }, is_normalized},
        {"grad_in", "gradient of the input's normalization from its sums", apply_gradient, is_normalized},
        {"norm_out", "scale, bias, ReLU of the output",
         [](Pattern& p, const Convolution& c) { normalize(p, c.batch, c.filters, c.out_side, false); },
         [](const Layer& layer) { return layer.output == "stem"; }},
        {"join", "scale, bias, sum with the shortcut, ReLU",
         [](Pattern& p, const Convolution& c) { normalize(p, c.batch, c.filters, c.out_side, true); }, is_join},
    };
    return all;
}

// A GPU with memory that is filled with random numbers, because zeros cost less power and run faster.
class Gpu {
   public:
    explicit Gpu(const Options& options) : options_(options) {
        arena_bytes_ = kArenaBytesPerImage * static_cast<size_t>(options.batch) + kRandomBytes;
        CHECK(cudaMalloc(&arena_, arena_bytes_));
        CHECK(cudaMalloc(&random_, kRandomBytes));
        CHECK(cudaMalloc(&flush_, kFlushBytes));
        std::vector<uint16_t> values(kRandomBytes / sizeof(uint16_t));
        uint32_t state = 1;
        for (auto& value : values) {
            state = state * 1664525u + 1013904223u;
            // FP16 between 2^-8 and 2 with a random sign: sign, an exponent of 7 to 15, and ten bits of fraction.
            const uint32_t exponent = 7 + (state >> 24) % 9;
            value = static_cast<uint16_t>((state >> 31) << 15 | exponent << 10 | ((state >> 12) & 0x3ff));
        }
        CHECK(cudaMemcpy(random_, values.data(), kRandomBytes, cudaMemcpyHostToDevice));
        CHECK(cudaEventCreate(&start_));
        CHECK(cudaEventCreate(&stop_));
        CHECK(cudnnCreate(&handle_));
    }

    cudnnHandle_t handle() const { return handle_; }

    // Begins a new set of tensors: all memory is random again.
    void reset() {
        used_ = 0;
        for (size_t at = 0; at < arena_bytes_; at += kRandomBytes) {
            const size_t bytes = std::min(kRandomBytes, arena_bytes_ - at);
            CHECK(cudaMemcpyAsync(arena_ + at, random_, bytes, cudaMemcpyDeviceToDevice));
        }
    }

    void* take(size_t bytes) {
        void* result = arena_ + used_;
        used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
        if (used_ > arena_bytes_) throw std::runtime_error("the tensors of a pattern do not fit into the arena");
        return result;
    }

    void* workspace(size_t bytes) {
        if (bytes > workspace_bytes_) {
            CHECK(cudaFree(workspace_));
            CHECK(cudaMalloc(&workspace_, bytes));
            workspace_bytes_ = bytes;
        }
        return workspace_;
    }

    // Returns the median time in ms. Before each run the L2 cache is flushed.
    double time(const std::function<void()>& launch) {
        for (int run = 0; run < kWarmupRuns; ++run) launch();
        std::vector<float> times;
        for (int run = 0; run < options_.runs; ++run) {
            CHECK(cudaMemsetAsync(flush_, 0, kFlushBytes));
            CHECK(cudaEventRecord(start_));
            launch();
            CHECK(cudaEventRecord(stop_));
            CHECK(cudaEventSynchronize(stop_));
            float ms = 0;
            CHECK(cudaEventElapsedTime(&ms, start_, stop_));
            times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }

    const Options& options() const { return options_; }

   private:
    const Options& options_;
    char* arena_ = nullptr;
    char* random_ = nullptr;
    char* flush_ = nullptr;
    void* workspace_ = nullptr;
    size_t arena_bytes_ = 0, used_ = 0, workspace_bytes_ = 0;
    cudaEvent_t start_ = nullptr, stop_ = nullptr;
    cudnnHandle_t handle_ = nullptr;
};

// Returns the time of the fastest plan of a pattern, or nothing and the reason if there is no plan.
std::optional<double> time_pattern(Gpu& gpu, const Build& build, const Convolution& convolution, std::string& reason) {
    // Engines differ in the type that they demand between the operations of a pattern.
    for (auto intermediate : {fe::DataType_t::HALF, fe::DataType_t::FLOAT}) {
        Pattern pattern(intermediate);
        build(pattern, convolution);
        auto& graph = pattern.graph();
        auto status = graph.validate();
        if (status.is_good()) status = graph.build_operation_graph(gpu.handle());
        if (status.is_good()) status = graph.create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK});
        if (status.is_bad()) {
            reason = status.get_message();
            continue;
        }
        gpu.reset();
        std::unordered_map<int64_t, void*> pointers;
        for (const auto& [tensor, bytes] : pattern.stored()) pointers[tensor->get_uid()] = gpu.take(bytes);
        std::optional<double> fastest;
        int built = 0;
        for (int64_t index = 0; index < graph.get_execution_plan_count() && built < gpu.options().plans; ++index) {
            status = graph.build_plan_at_index(gpu.handle(), index);
            if (status.is_bad()) {
                reason = status.get_message();
                continue;
            }
            void* workspace = gpu.workspace(static_cast<size_t>(graph.get_workspace_size_plan_at_index(index)));
            status = graph.execute_plan_at_index(gpu.handle(), pointers, workspace, index);
            if (status.is_bad() || cudaDeviceSynchronize() != cudaSuccess) {
                reason = status.get_message();
                cudaGetLastError();
                continue;
            }
            ++built;
            const double ms = gpu.time([&] {
                if (graph.execute_plan_at_index(gpu.handle(), pointers, workspace, index).is_bad()) {
                    throw std::runtime_error("a plan failed that had run before");
                }
            });
            fastest = fastest ? std::min(*fastest, ms) : ms;
        }
        if (fastest) return fastest;
    }
    return std::nullopt;
}

// Today's normalization, as TensorFlow calls it: with ReLU, or with the sum and ReLU, in one call in each direction.
class Normalization {
   public:
    Normalization(Gpu& gpu, const std::string& output, int64_t batch, int64_t channels, int64_t side)
        : gpu_(gpu), bytes_(static_cast<size_t>(batch * channels * side * side) * 2), channels_(channels) {
        CHECK(cudnnCreateTensorDescriptor(&images_));
        CHECK(cudnnCreateTensorDescriptor(&vectors_));
        CHECK(cudnnCreateActivationDescriptor(&relu_));
        CHECK(cudnnSetTensor4dDescriptor(images_, CUDNN_TENSOR_NHWC, CUDNN_DATA_HALF, static_cast<int>(batch),
                                         static_cast<int>(channels), static_cast<int>(side), static_cast<int>(side)));
        CHECK(cudnnDeriveBNTensorDescriptor(vectors_, images_, kMode));
        CHECK(cudnnSetActivationDescriptor(relu_, CUDNN_ACTIVATION_RELU, CUDNN_PROPAGATE_NAN, 0));
        if (output == "join") {
            operations_ = CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION;
        } else if (output != "shortcut") {
            operations_ = CUDNN_BATCHNORM_OPS_BN_ACTIVATION;
        }
        adds_ = operations_ == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION;
        has_relu_ = operations_ != CUDNN_BATCHNORM_OPS_BN;
        gpu_.reset();
        x_ = gpu_.take(bytes_);
        y_ = gpu_.take(bytes_);
        dy_ = gpu_.take(bytes_);
        dx_ = gpu_.take(bytes_);
        z_ = adds_ ? gpu_.take(bytes_) : nullptr;
        for (auto& vector : vector_) vector = static_cast<float*>(gpu_.take(static_cast<size_t>(channels) * 4));
        CHECK(cudnnGetBatchNormalizationTrainingExReserveSpaceSize(gpu_.handle(), kMode, operations_, activation(),
                                                                   images_, &reserve_bytes_));
        reserve_ = gpu_.take(reserve_bytes_);
    }

    ~Normalization() {
        cudnnDestroyTensorDescriptor(images_);
        cudnnDestroyTensorDescriptor(vectors_);
        cudnnDestroyActivationDescriptor(relu_);
    }

    Normalization(const Normalization&) = delete;
    Normalization& operator=(const Normalization&) = delete;

    double time_forward() {
        size_t bytes = 0;
        CHECK(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(gpu_.handle(), kMode, operations_, images_,
                                                                       sum_descriptor(), images_, vectors_,
                                                                       activation(), &bytes));
        void* workspace = gpu_.workspace(bytes);
        return gpu_.time([&] {
            CHECK(cudnnBatchNormalizationForwardTrainingEx(
                gpu_.handle(), kMode, operations_, &kOne, &kZero, images_, x_, sum_descriptor(), z_, images_, y_,
                vectors_, vector_[0], vector_[1], 1.0, vector_[2], vector_[3], kEpsilon, vector_[4], vector_[5],
                activation(), workspace, bytes, reserve_, reserve_bytes_));
        });
    }

    double time_backward() {
        // The reserve space holds the bits of ReLU from a forward pass.
        time_forward();
        size_t bytes = 0;
        CHECK(cudnnGetBatchNormalizationBackwardExWorkspaceSize(
            gpu_.handle(), kMode, operations_, images_, has_relu_ ? images_ : nullptr, images_, sum_descriptor(),
            images_, vectors_, activation(), &bytes));
        void* workspace = gpu_.workspace(bytes);
        return gpu_.time([&] {
            CHECK(cudnnBatchNormalizationBackwardEx(
                gpu_.handle(), kMode, operations_, &kOne, &kZero, &kOne, &kZero, images_, x_,
                has_relu_ ? images_ : nullptr, has_relu_ ? y_ : nullptr, images_, dy_, sum_descriptor(), z_, images_,
                dx_, vectors_, vector_[0], vector_[1], vector_[2], vector_[3], kEpsilon, vector_[4], vector_[5],
                activation(), workspace, bytes, reserve_, reserve_bytes_));
        });
    }

   private:
    static constexpr cudnnBatchNormMode_t kMode = CUDNN_BATCHNORM_SPATIAL_PERSISTENT;
    static constexpr float kOne = 1, kZero = 0;

    cudnnTensorDescriptor_t sum_descriptor() const { return adds_ ? images_ : nullptr; }
    cudnnActivationDescriptor_t activation() const { return has_relu_ ? relu_ : nullptr; }

    Gpu& gpu_;
    size_t bytes_;
    int64_t channels_;
    cudnnBatchNormOps_t operations_ = CUDNN_BATCHNORM_OPS_BN;
    bool adds_ = false, has_relu_ = false;
    cudnnTensorDescriptor_t images_ = nullptr, vectors_ = nullptr;
    cudnnActivationDescriptor_t relu_ = nullptr;
    void *x_ = nullptr, *y_ = nullptr, *dy_ = nullptr, *dx_ = nullptr, *z_ = nullptr, *reserve_ = nullptr;
    float* vector_[6] = {};
    size_t reserve_bytes_ = 0;
};

using Times = std::map<std::string, double>;

// Sums in ms of what runs for a layer today, and of the fused patterns.
struct Totals {
    double today, fused;
};

Totals totals_of(const Layer& layer, const Times& times) {
    constexpr double kMissing = 1e9;
    auto time = [&](const char* kind) {
        auto found = times.find(kind);
        return found == times.end() ? kMissing : found->second;
    };
    double today = time("conv") + time("wgrad") + time("bn") + time("bn_grad");
    if (has_gradient(layer)) today += time("dgrad");

    // The forward pass of today's normalization computes the statistics too.
    const double statistics = std::min(time("stats"), time("bn"));
    double fused = std::min(time("conv_stats"), time("conv") + statistics);
    if (layer.is_normalized()) fused = std::min(time("norm_conv_stats"), time("norm_in") + fused);
    // Without an engine, a few of TensorFlow's operations would do it.
    fused += std::min(time("finalize"), kFinalizeMs);
    if (layer.output == "stem") fused += std::min(time("norm_out"), time("bn"));
    // The normalization of a projection is computed in the join.
    if (is_join(layer)) fused += std::min(time("join"), time("bn"));

    if (layer.is_normalized()) {
        // The separate passes compute the normalized input again, because the forward pass does not store it.
        fused += std::min(time("norm_wgrad"), time("norm_in") + time("wgrad"));
        fused += std::min(time("dgrad_relu_sums") + time("grad_in"),
                          time("norm_in") + time("dgrad") + time("bn_grad_in"));
    } else {
        fused += time("wgrad");
        if (has_gradient(layer)) fused += time("dgrad");
    }
    // The next convolution computes the gradient of an inner normalization.
    if (layer.output != "inner") fused += time("bn_grad");
    return {today, fused};
}

std::vector<Layer> read_layers(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::invalid_argument(path + ": cannot be read");
    std::vector<Layer> layers;
    std::string line;
    while (std::getline(file, line)) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream words(line);
        Layer layer;
        words >> layer.name >> layer.count >> layer.channels >> layer.side >> layer.filters >> layer.kernel >>
            layer.stride >> layer.input >> layer.output;
        if (!words) throw std::invalid_argument(path + ": not a layer: " + line);
        layers.push_back(layer);
    }
    return layers;
}

int64_t number(const std::string& word, size_t at) {
    const int64_t value = std::atoll(word.c_str() + at);
    if (value < 1 || value > 4096) throw std::invalid_argument(word + ": must be a number from 1 to 4096");
    return value;
}

Options parse(int count, char** words) {
    Options options;
    for (int index = 1; index < count; ++index) {
        const std::string word = words[index];
        if (word.rfind("--batch=", 0) == 0) {
            options.batch = number(word, 8);
        } else if (word.rfind("--runs=", 0) == 0) {
            options.runs = static_cast<int>(number(word, 7));
        } else if (word.rfind("--plans=", 0) == 0) {
            options.plans = static_cast<int>(number(word, 8));
        } else if (word == "--dry-run") {
            options.dry_run = true;
        } else if (word.rfind("--", 0) == 0 || !options.layers.empty()) {
            throw std::invalid_argument("unknown argument " + word);
        } else {
            options.layers = word;
        }
    }
    if (options.layers.empty()) throw std::invalid_argument("the file of the layers is missing");
    return options;
}

// Validates the graph of each pattern, which needs no GPU, and prints the list. Returns the number of invalid graphs.
int validate(const Options& options, const std::vector<Layer>& layers) {
    int invalid = 0;
    for (const auto& layer : layers) {
        const Convolution convolution(layer, options.batch);
        std::printf("%-23s x%lld  %lld x %lld x %lld -> %lld, kernel %lld, stride %lld\n", layer.name.c_str(),
                    static_cast<long long>(layer.count), static_cast<long long>(layer.side),
                    static_cast<long long>(layer.side), static_cast<long long>(layer.channels),
                    static_cast<long long>(layer.filters), static_cast<long long>(layer.kernel),
                    static_cast<long long>(layer.stride));
        for (const auto& kind : kinds()) {
            if (!kind.applies(layer)) continue;
            Pattern pattern(fe::DataType_t::FLOAT);
            kind.build(pattern, convolution);
            auto status = pattern.graph().validate();
            invalid += status.is_bad();
            std::printf("    %-16s %s%s%s\n", kind.name, kind.description, status.is_bad() ? ": INVALID: " : "",
                        status.is_bad() ? status.get_message().c_str() : "");
        }
    }
    return invalid;
}

void measure(const Options& options, const std::vector<Layer>& layers) {
    Gpu gpu(options);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    std::printf("%s, cuDNN %zu, %lld images, FP16, NHWC, median of %d runs in ms\n\n", properties.name,
                cudnnGetVersion(), static_cast<long long>(options.batch), options.runs);
    double today = 0, fused = 0;
    int64_t convolutions = 0;
    std::map<std::string, std::string> reasons;
    for (const auto& layer : layers) {
        const Convolution convolution(layer, options.batch);
        Times times;
        for (const auto& kind : kinds()) {
            if (!kind.applies(layer)) continue;
            std::string reason;
            if (const auto ms = time_pattern(gpu, kind.build, convolution, reason)) {
                times[kind.name] = *ms;
            } else {
                reasons.emplace(kind.name, layer.name + ": " + reason);
            }
        }
        {
            Normalization normalization(gpu, layer.output, options.batch, layer.filters, layer.out_side());
            times["bn"] = normalization.time_forward();
            times["bn_grad"] = normalization.time_backward();
        }
        if (layer.is_normalized()) {
            Normalization normalization(gpu, "inner", options.batch, layer.channels, layer.side);
            times["bn_grad_in"] = normalization.time_backward();
        }
        const Totals totals = totals_of(layer, times);
        convolutions += layer.count;
        today += totals.today * static_cast<double>(layer.count);
        fused += totals.fused * static_cast<double>(layer.count);
        std::printf("%-23s x%lld  today %.3f  fused %.3f\n   ", layer.name.c_str(),
                    static_cast<long long>(layer.count), totals.today, totals.fused);
        for (const auto& [kind, ms] : times) std::printf(" %s %.3f", kind.c_str(), ms);
        std::printf("\n");
        // A run may be cut off, and these lines are then all that remains.
        std::fflush(stdout);
    }
    for (const auto& [kind, reason] : reasons) std::printf("no engine for %s, %s\n", kind.c_str(), reason.c_str());
    std::printf("\nSum over %lld convolutions with their normalizations: today %.2f ms, fused %.2f ms: %.2f ms less.\n",
                static_cast<long long>(convolutions), today, fused, today - fused);
    std::printf("The custom operation is worth it if the sum is %.0f ms less. It is%s.\n", kWorthwhileMs,
                today - fused >= kWorthwhileMs ? "" : " not");
}

bool has_gpu() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

}  // namespace

int main(int count, char** words) {
    try {
        const Options options = parse(count, words);
        const auto layers = read_layers(options.layers);
        if (options.dry_run || !has_gpu()) {
            const int invalid = validate(options, layers);
            std::printf("\nNothing was timed%s. %d graphs are invalid.\n",
                        options.dry_run ? "" : ", because there is no GPU", invalid);
            return invalid ? EXIT_FAILURE : EXIT_SUCCESS;
        }
        measure(options, layers);
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return kExitUsage;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
