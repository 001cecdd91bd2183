// The kernels of a gated delta net, written plainly from the formulas (see buildkit/gdn/reference.py), with the C entry
// points that inference servers built on attention-rs have. They exist to prove the smoke test: fast they are not.
//
// Build-time choices
//   -DGDN_FAULT_<NAME>   injects one fault, named as in buildkit/gdn/faults.py (KEY_BAND_ZEROED, L2_NORM_LANE_0, ...)
//   -DGDN_CONTRACT_DECAY the later calling contract: float32 gates, the decay itself instead of its logarithm, state
//                        [heads, K, V], float32 conv state, snapshot arguments (see buildkit/gdn/contracts.py)
//
// Every pointer is a device pointer. Launch errors are printed to stdout, as the servers' kernels do; nothing is returned.

#include <cstdint>
#include <cstdio>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kMaxWidth = 4;

__device__ inline float load(float x) { return x; }
__device__ inline float load(__half x) { return __half2float(x); }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ inline T store(float x);
template <> __device__ inline float store<float>(float x) { return x; }
template <> __device__ inline __half store<__half>(float x) { return __float2half(x); }
template <> __device__ inline __nv_bfloat16 store<__nv_bfloat16>(float x) { return __float2bfloat16(x); }

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float activate(float x, bool silu) {
#ifdef GDN_FAULT_SILU_MISSING
    return x;
#else
    return silu ? x * sigmoid(x) : x;
#endif
}

void report(const char *entry) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        printf("%s: CUDA error %d: %s\n", entry, static_cast<int>(error), cudaGetErrorString(error));
        fflush(stdout);
    }
}

// The contract's types: what holds the gates, the gating parameters and the conv state.
#ifdef GDN_CONTRACT_DECAY
template <typename T> using Gate = float;
template <typename T> using ConvState = float;
#else
template <typename T> using Gate = T;
template <typename T> using ConvState = T;
#endif

__device__ inline float decay_of(float g) {
#if defined(GDN_FAULT_DECAY_IGNORED)
    return 1.0f;
#elif defined(GDN_CONTRACT_DECAY)
#if defined(GDN_FAULT_DECAY_TWICE)
    return expf(g);
#elif defined(GDN_FAULT_DECAY_RAW)
    return logf(g);
#else
    return g;
#endif
#else
#if defined(GDN_FAULT_DECAY_TWICE)
    return expf(expf(g));
#elif defined(GDN_FAULT_DECAY_RAW)
    return g;
#else
    return expf(g);
#endif
#endif
}

__device__ inline size_t state_index(int k, int v, int key_dim, int value_dim) {
#ifdef GDN_CONTRACT_DECAY
    return static_cast<size_t>(k) * value_dim + v;
#else
    return static_cast<size_t>(v) * key_dim + k;
#endif
}

// y[t, c] = SiLU(bias[c] + sum_w x[t - W + 1 + w, c] * weight[c, w]): one thread follows one channel of one sequence.
template <typename T>
__global__ void conv_prefill(const T *x, const T *weight, const T *bias, ConvState<T> *state, T *out, T *snapshots,
                             const uint32_t *cu_seqlens, int channels, int width, bool silu) {
    const int sequence = blockIdx.x;
    const int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const int history = width - 1;
    ConvState<T> *own = state + (static_cast<size_t>(sequence) * channels + c) * history;
    float line[kMaxWidth] = {0.0f};  // line[0 .. history) are the inputs before token t, oldest first
    for (int w = 0; w < history; ++w) line[w] = load(own[w]);
    for (uint32_t t = cu_seqlens[sequence]; t < cu_seqlens[sequence + 1]; ++t) {
        const size_t at = static_cast<size_t>(t) * channels + c;
        line[history] = load(x[at]);
        float y = bias ? load(bias[c]) : 0.0f;
        for (int w = 0; w < width; ++w) y += line[w] * load(weight[static_cast<size_t>(c) * width + w]);
        y = activate(y, silu);
#ifdef GDN_FAULT_KEY_BAND_ZEROED
        // q | k | v with a value band as wide as q and k together: the key band is the second quarter
        if (c >= channels / 4 && c < channels / 2) y = 0.0f;
#endif
        out[at] = store<T>(y);
        for (int w = 0; w < history; ++w) {
            line[w] = line[w + 1];
            if (snapshots) snapshots[at * history + w] = store<T>(line[w]);
        }
    }
#ifndef GDN_FAULT_CONV_STATE_DROPPED
    for (int w = 0; w < history; ++w) own[w] = store<ConvState<T>>(line[w]);
#endif
}

template <typename T>
__global__ void conv_decode(const T *x, const T *weight, const T *bias, ConvState<T> *state, const int64_t *slots,
                            T *out, int channels, int width, bool silu) {
    const int row = blockIdx.x;
    const int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= channels || slots[row] < 0) return;
    const int history = width - 1;
    ConvState<T> *own = state + (static_cast<size_t>(slots[row]) * channels + c) * history;
    float line[kMaxWidth] = {0.0f};
#ifndef GDN_FAULT_CONV_STATE_UNREAD
    for (int w = 0; w < history; ++w) line[w] = load(own[w]);
#endif
    const size_t at = static_cast<size_t>(row) * channels + c;
    line[history] = load(x[at]);
    float y = bias ? load(bias[c]) : 0.0f;
    for (int w = 0; w < width; ++w) y += line[w] * load(weight[static_cast<size_t>(c) * width + w]);
    out[at] = store<T>(activate(y, silu));
#ifndef GDN_FAULT_CONV_STATE_FROZEN
    for (int w = 0; w < history; ++w) own[w] = store<ConvState<T>>(line[w + 1]);
#endif
}

// g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b)
template <typename P, typename D, typename T, typename G>
__global__ void gating(const P *a_log, const T *a, const T *b, const D *dt_bias, G *g, G *beta, int total, int heads) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const int h = i % heads;
    const float x = load(a[i]) + load(dt_bias[h]);
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    g[i] = store<G>(-expf(load(a_log[h])) * softplus);
    beta[i] = store<G>(sigmoid(load(b[i])));
}

// x / sqrt(sum x^2 + eps): one warp per row, lane i holds the elements i, i + 32, ...
template <typename T> __global__ void l2_norm(const T *input, T *output, int dim, float eps) {
    const T *row = input + static_cast<size_t>(blockIdx.x) * dim;
    T *out = output + static_cast<size_t>(blockIdx.x) * dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += 32) sum += load(row[i]) * load(row[i]);
    for (int offset = 16; offset > 0; offset /= 2) {
#if defined(GDN_FAULT_L2_NORM_LANE_0) || defined(GDN_FAULT_L2_NORM_OTHERS_RAW)
        sum += __shfl_down_sync(0xffffffffu, sum, offset);  // only lane 0 ends with the whole sum
#else
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
#endif
    }
    float scale = rsqrtf(sum + eps);
#ifdef GDN_FAULT_L2_NORM_OTHERS_RAW
    if (threadIdx.x != 0) scale = 1.0f;
#endif
    for (int i = threadIdx.x; i < dim; i += 32) out[i] = store<T>(load(row[i]) * scale);
}

// The delta rule for one value head of one sequence; each thread owns one column of the state, S[:, v].
// Decode is the same with one token per sequence (cu_seqlens null).
template <typename T, typename G, typename S, int K>
__global__ void delta_rule(const T *q, const T *k, const T *v, const G *g, const G *beta, S *state,
                           const int64_t *slots, T *out, float *snapshots, const uint32_t *cu_seqlens, int value_heads,
                           int key_heads, int key_dim, int value_dim, float q_scale, bool log_decay) {
    __shared__ float keys[K], queries[K];
    const int head = blockIdx.x;
    const int sequence = blockIdx.y;
    const int column = blockIdx.z * blockDim.x + threadIdx.x;
    if (slots[sequence] < 0) return;
#ifdef GDN_FAULT_GQA_INTERLEAVED
    const int key_head = head % key_heads;
#else
    const int key_head = head / (value_heads / key_heads);
#endif
    const size_t state_size = static_cast<size_t>(key_dim) * value_dim;
    S *own = state + (static_cast<size_t>(slots[sequence]) * value_heads + head) * state_size;
    const bool active = column < value_dim;
    float s[K];
    for (int i = 0; i < key_dim; ++i) s[i] = active ? load(own[state_index(i, column, key_dim, value_dim)]) : 0.0f;
    const int64_t first = cu_seqlens ? cu_seqlens[sequence] : sequence;
    const int64_t last = cu_seqlens ? cu_seqlens[sequence + 1] : sequence + 1;
    for (int64_t t = first; t < last; ++t) {
        __syncthreads();
        for (int i = threadIdx.x; i < key_dim; i += blockDim.x) {
            const size_t at = (t * key_heads + key_head) * key_dim + i;
#ifdef GDN_FAULT_QK_SWAPPED
            keys[i] = load(q[at]), queries[i] = load(k[at]) * q_scale;
#else
            keys[i] = load(k[at]), queries[i] = load(q[at]) * q_scale;
#endif
        }
        __syncthreads();
        if (!active) continue;
        const size_t gate = t * value_heads + head;
        const float raw = load(g[gate]);
        const float decay = log_decay ? expf(raw) : decay_of(raw);
        float held = 0.0f;
        for (int i = 0; i < key_dim; ++i) {
            s[i] *= decay;
            held += s[i] * keys[i];
        }
        const size_t at = gate * value_dim + column;
        const float u = load(beta[gate]) * (load(v[at]) - held);
        float o = 0.0f;
        for (int i = 0; i < key_dim; ++i) {
            s[i] += keys[i] * u;
            o += s[i] * queries[i];
            if (snapshots) snapshots[gate * state_size + state_index(i, column, key_dim, value_dim)] = s[i];
        }
#ifdef GDN_FAULT_OUTPUT_ZERO
        o = 0.0f;
#endif
        out[at] = store<T>(o);
    }
    if (!active) return;
    for (int i = 0; i < key_dim; ++i) own[state_index(i, column, key_dim, value_dim)] = store<S>(s[i]);
}

// o * rsqrt(mean(o^2) + eps) * gamma * SiLU(z): one block per group of one row
template <typename T, typename P>
__global__ void gated_norm(const T *x, const T *z, const P *gamma, const P *bias, T *out, int value_dim, int group,
                           float eps, bool per_group) {
    __shared__ float sums[128];
    const size_t first = static_cast<size_t>(blockIdx.x) * value_dim + static_cast<size_t>(blockIdx.y) * group;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < group; i += blockDim.x) sum += load(x[first + i]) * load(x[first + i]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    const float scale = rsqrtf(sums[0] / group + eps);
    for (int i = threadIdx.x; i < group; i += blockDim.x) {
        const int weight = per_group ? i : blockIdx.y * group + i;
        float y = load(x[first + i]) * scale * load(gamma[weight]);
        if (bias) y += load(bias[weight]);
#ifndef GDN_FAULT_GATE_Z_IGNORED
        const float gate = load(z[first + i]);
        y *= gate * sigmoid(gate);
#endif
        out[first + i] = store<T>(y);
    }
}

constexpr int kThreads = 128;
int blocks(int n) { return (n + kThreads - 1) / kThreads; }

template <typename T>
void run_conv_prefill(const T *x, const T *weight, const T *bias, ConvState<T> *state, T *out, T *snapshots,
                      const uint32_t *cu_seqlens, int batch, int channels, int width, bool silu, int64_t stream) {
    if (width < 2 || width > kMaxWidth) {
        printf("causal_conv1d_fwd: width %d is not 2, 3 or 4\n", width);
        return;
    }
    conv_prefill<T><<<dim3(batch, blocks(channels)), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        x, weight, bias, state, out, snapshots, cu_seqlens, channels, width, silu);
    report("causal_conv1d_fwd");
}

template <typename T>
void run_conv_decode(const T *x, const T *weight, const T *bias, ConvState<T> *state, const int64_t *slots, T *out,
                     int batch, int channels, int width, bool silu, int64_t stream) {
    if (width < 2 || width > kMaxWidth) {
        printf("causal_conv1d_update_slots: width %d is not 2, 3 or 4\n", width);
        return;
    }
    conv_decode<T><<<dim3(batch, blocks(channels)), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        x, weight, bias, state, slots, out, channels, width, silu);
    report("causal_conv1d_update_slots");
}

template <typename P, typename D, typename T, typename G>
void run_gating(const P *a_log, const T *a, const T *b, const D *dt_bias, G *g, G *beta, int batch, int seq, int heads,
                int64_t stream) {
    const int total = batch * seq * heads;
    gating<P, D, T, G><<<blocks(total), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(a_log, a, b, dt_bias, g,
                                                                                                beta, total, heads);
    report("fused_gdn_gating");
}

template <typename T> void run_l2_norm(const T *in, T *out, int rows, int dim, float eps, int64_t stream) {
    l2_norm<T><<<rows, 32, 0, reinterpret_cast<cudaStream_t>(stream)>>>(in, out, dim, eps);
    report("l2_norm_last_dim");
}

template <typename T, typename G, typename S>
void run_delta_rule(const char *entry, const T *q, const T *k, const T *v, const G *g, const G *beta, S *state,
                    const int64_t *slots, T *out, float *snapshots, const uint32_t *cu_seqlens, int batch,
                    int value_heads, int key_heads, int key_dim, int value_dim, float q_scale, bool log_decay,
                    int64_t stream) {
    const dim3 grid(value_heads, batch, (value_dim + 63) / 64);
    const cudaStream_t queue = reinterpret_cast<cudaStream_t>(stream);
    if (key_dim <= 64) {
        delta_rule<T, G, S, 64><<<grid, 64, 0, queue>>>(q, k, v, g, beta, state, slots, out, snapshots, cu_seqlens,
                                                        value_heads, key_heads, key_dim, value_dim, q_scale, log_decay);
    } else if (key_dim <= 128) {
        delta_rule<T, G, S, 128><<<grid, 64, 0, queue>>>(q, k, v, g, beta, state, slots, out, snapshots, cu_seqlens,
                                                         value_heads, key_heads, key_dim, value_dim, q_scale,
                                                         log_decay);
    } else {
        printf("%s: key dim %d is above 128\n", entry, key_dim);
        return;
    }
    report(entry);
}

template <typename T, typename P>
void run_gated_norm(const T *x, const T *z, const P *gamma, const P *bias, T *out, int rows, int value_dim, int group,
                    float eps, bool per_group, bool has_bias, int64_t stream) {
    gated_norm<T, P><<<dim3(rows, value_dim / group), 128, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        x, z, gamma, has_bias ? bias : nullptr, out, value_dim, group, eps, per_group);
    report("gdn_gated_rmsnorm_silu_mul");
}

#ifdef GDN_FAULT_Q_NOT_SCALED
constexpr bool kScaleQ = false;
#else
constexpr bool kScaleQ = true;
#endif

}  // namespace

#ifdef GDN_CONTRACT_DECAY
#define SNAPSHOTS(T) T *snapshots,
#define NO_SNAPSHOTS snapshots
#else
#define SNAPSHOTS(T)
#define NO_SNAPSHOTS nullptr
#endif

#define ENTRIES(SUFFIX, T)                                                                                              \
    extern "C" void causal_conv1d_fwd_##SUFFIX(const T *x, const T *weight, const T *bias, ConvState<T> *conv_state,    \
                                               T *out, SNAPSHOTS(T) const uint32_t *cu_seqlens, int batch, int d_conv,  \
                                               int width, bool silu, int64_t stream) {                                  \
        run_conv_prefill<T>(x, weight, bias, conv_state, out, NO_SNAPSHOTS, cu_seqlens, batch, d_conv, width, silu,     \
                            stream);                                                                                    \
    }                                                                                                                   \
    extern "C" void causal_conv1d_update_slots_##SUFFIX(const T *x, const T *weight, const T *bias,                     \
                                                        ConvState<T> *conv_state, const int64_t *slots, T *out,         \
                                                        int batch, int d_conv, int width, bool silu, int64_t stream) {  \
        run_conv_decode<T>(x, weight, bias, conv_state, slots, out, batch, d_conv, width, silu, stream);                \
    }                                                                                                                   \
    extern "C" void l2_norm_last_dim_##SUFFIX(const T *input, T *output, int rows, int dim, float eps,                  \
                                              int64_t stream) {                                                         \
        run_l2_norm<T>(input, output, rows, dim, eps, stream);                                                          \
    }                                                                                                                   \
    extern "C" void gated_delta_rule_recurrence_varlen_##SUFFIX(                                                        \
        const T *q, const T *k, const T *v, const Gate<T> *g, const Gate<T> *beta, float *state, const int64_t *slots,  \
        T *out, SNAPSHOTS(float) const uint32_t *cu_seqlens, int batch, int heads, int k_dim, int v_dim,                \
        int64_t stream) {                                                                                               \
        run_delta_rule("gated_delta_rule_recurrence_varlen", q, k, v, g, beta, state, slots, out, NO_SNAPSHOTS,         \
                       cu_seqlens, batch, heads, heads, k_dim, v_dim, 1.0f, false, stream);                             \
    }                                                                                                                   \
    extern "C" void gated_delta_rule_decode_slots_##SUFFIX(                                                             \
        const T *q, const T *k, const T *v, const Gate<T> *g, const Gate<T> *beta, T *state, const int64_t *slots,      \
        T *out, int batch, int heads, int k_dim, int v_dim, int64_t stream) {                                           \
        run_delta_rule("gated_delta_rule_decode_slots", q, k, v, g, beta, state, slots, out,                            \
                       static_cast<float *>(nullptr), nullptr, batch, heads, heads, k_dim, v_dim, 1.0f, false, stream); \
    }                                                                                                                   \
    extern "C" void gated_delta_rule_decode_slots_gqa_##SUFFIX(                                                         \
        const T *q, const T *k, const T *v, const float *g, const float *beta, float *state, const int64_t *slots,      \
        T *out, int batch, int v_heads, int k_heads, int k_dim, int v_dim, float q_scale, int64_t stream) {             \
        run_delta_rule("gated_delta_rule_decode_slots_gqa", q, k, v, g, beta, state, slots, out,                        \
                       static_cast<float *>(nullptr), nullptr, batch, v_heads, k_heads, k_dim, v_dim,                   \
                       kScaleQ ? q_scale : 1.0f, true, stream);                                                         \
    }                                                                                                                   \
    extern "C" void gated_delta_rule_recurrence_varlen_gqa_##SUFFIX(                                                    \
        const T *q, const T *k, const T *v, const float *g, const float *beta, float *state, const int64_t *slots,      \
        T *out, float *snapshots, const uint32_t *cu_seqlens, int batch, int v_heads, int k_heads, int k_dim,           \
        int v_dim, float q_scale, int64_t stream) {                                                                     \
        run_delta_rule("gated_delta_rule_recurrence_varlen_gqa", q, k, v, g, beta, state, slots, out, snapshots,        \
                       cu_seqlens, batch, v_heads, k_heads, k_dim, v_dim, kScaleQ ? q_scale : 1.0f, true, stream);      \
    }                                                                                                                   \
    extern "C" void gdn_gated_rmsnorm_silu_mul_##SUFFIX(const T *x, const T *z, const T *gamma, const T *bias, T *out,  \
                                                        int rows, int value_dim, int group_size, float eps,             \
                                                        bool per_group_weights, bool has_bias, int64_t stream) {        \
        run_gated_norm<T, T>(x, z, gamma, bias, out, rows, value_dim, group_size, eps, per_group_weights, has_bias,     \
                             stream);                                                                                   \
    }

ENTRIES(f32, float)
ENTRIES(f16, __half)
ENTRIES(bf16, __nv_bfloat16)

// What only the narrow types have: a float32 state in decode, float32 norm weights and a float32 A_log.
#define NARROW_ENTRIES(SUFFIX, T)                                                                                       \
    extern "C" void gated_delta_rule_decode_slots_##SUFFIX##_state_f32(                                                 \
        const T *q, const T *k, const T *v, const Gate<T> *g, const Gate<T> *beta, float *state, const int64_t *slots,  \
        T *out, int batch, int heads, int k_dim, int v_dim, int64_t stream) {                                           \
        run_delta_rule("gated_delta_rule_decode_slots", q, k, v, g, beta, state, slots, out,                            \
                       static_cast<float *>(nullptr), nullptr, batch, heads, heads, k_dim, v_dim, 1.0f, false, stream); \
    }                                                                                                                   \
    extern "C" void gdn_gated_rmsnorm_silu_mul_##SUFFIX##_wf32(                                                         \
        const T *x, const T *z, const float *gamma, const float *bias, T *out, int rows, int value_dim, int group_size, \
        float eps, bool per_group_weights, bool has_bias, int64_t stream) {                                             \
        run_gated_norm<T, float>(x, z, gamma, bias, out, rows, value_dim, group_size, eps, per_group_weights,           \
                                 has_bias, stream);                                                                     \
    }

NARROW_ENTRIES(f16, __half)
NARROW_ENTRIES(bf16, __nv_bfloat16)

extern "C" void fused_gdn_gating_f32(const float *a_log, const float *a, const float *b, const float *dt_bias, float *g,
                                     float *beta, int batch, int seq, int heads, int64_t stream) {
    run_gating(a_log, a, b, dt_bias, g, beta, batch, seq, heads, stream);
}

#ifdef GDN_CONTRACT_DECAY
#define GATING(SUFFIX, T)                                                                                               \
    extern "C" void fused_gdn_gating_##SUFFIX(const float *a_log, const T *a, const T *b, const float *dt_bias,         \
                                              float *g, float *beta, int batch, int seq, int heads, int64_t stream) {   \
        run_gating(a_log, a, b, dt_bias, g, beta, batch, seq, heads, stream);                                           \
    }
#else
#define GATING(SUFFIX, T)                                                                                               \
    extern "C" void fused_gdn_gating_##SUFFIX(const T *a_log, const T *a, const T *b, const T *dt_bias, T *g, T *beta,  \
                                              int batch, int seq, int heads, int64_t stream) {                          \
        run_gating(a_log, a, b, dt_bias, g, beta, batch, seq, heads, stream);                                           \
    }                                                                                                                   \
    extern "C" void fused_gdn_gating_##SUFFIX##_alog_f32(const float *a_log, const T *a, const T *b, const T *dt_bias,  \
                                                         T *g, T *beta, int batch, int seq, int heads,                  \
                                                         int64_t stream) {                                              \
        run_gating(a_log, a, b, dt_bias, g, beta, batch, seq, heads, stream);                                           \
    }
#endif

GATING(f16, __half)
GATING(bf16, __nv_bfloat16)
