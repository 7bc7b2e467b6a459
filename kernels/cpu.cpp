// What decoding and training do between their matmuls, for float and bfloat16 on a CPU. See cpu.py for the reference.
//
// All sums run in fp32. Vectors are 16 floats wide whatever the machine; the compiler splits them where it has to.
// Sizes (head size, hidden size, MLP width) are multiples of 16, checked by the caller.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int W = 16;
#ifndef SIZES  // head sizes in vectors; each costs a second or more of compiling
#define SIZES CASE(1) CASE(2) CASE(4) CASE(5) CASE(6) CASE(8) CASE(16)
#endif
typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
struct bf16 {
    uint16_t bits;
};

inline vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline vf load(const bf16* p) {
#ifdef __AVX512F__  // GCC 12 makes slow code of the portable form
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) {  // round to nearest even
    vu u = (vu)x;
    u = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)u));
#else
    vh h = __builtin_convertvector(u, vh);
    std::memcpy(p, &h, sizeof h);
#endif
}
template <typename T>
inline vf rounded(vf x) {  // what a load gives back after a store
    T box[W];
    store(box, x);
    return load(box);
}
inline vf splat(float x) { return x - vf{}; }

inline float sum(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < W; ++i) total += x[i];
    return total;
#endif
}

// exp(x) for x <= 88 to 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' coefficients).
inline vf vexp(vf x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf y = p * r * r + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return y * (vf)e;
}

// hidden += delta (when given); out = hidden / rms(hidden) * weight. One row.
template <typename T>
void add_norm_row(T* hidden, const T* delta, const float* weight, T* out, int64_t dim, float eps) {
    vf squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vf x = load(hidden + i);
        if (delta != nullptr) {
            x = rounded<T>(x + load(delta + i));
            store(hidden + i, x);
        }
        squares += x * x;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / dim + eps);
    for (int64_t i = 0; i < dim; i += W) store(out + i, load(hidden + i) * scale * load(weight + i));
}

// RMS norm (when weight is given) and rotary embedding of one head, into fp32. cos and sin hold `half` values: the first
// 2 * half of the D numbers are rotated.
template <typename T>
void prepare_head(const T* x, const float* weight, const T* cos, const T* sin, int64_t half, float eps, int64_t D,
                  float* out) {
    vf squares = {};
    for (int64_t i = 0; i < D; i += W) {
        vf v = load(x + i);
        squares += v * v;
        store(out + i, v);
    }
    if (weight != nullptr) {
        const float scale = 1.0f / std::sqrt(sum(squares) / D + eps);
        for (int64_t i = 0; i < D; i += W) store(out + i, load(out + i) * scale * load(weight + i));
    }
    for (int64_t i = 0; i < half; ++i) {
        float c, s;
        if constexpr (sizeof(T) == 4) {
            c = cos[i];
            s = sin[i];
        } else {
            uint32_t cb = uint32_t(cos[i].bits) << 16, sb = uint32_t(sin[i].bits) << 16;
            std::memcpy(&c, &cb, 4);
            std::memcpy(&s, &sb, 4);
        }
        const float a = out[i], b = out[i + half];
        out[i] = a * c - b * s;
        out[i + half] = b * c + a * s;
    }
}

// H query heads against one key/value head: scores, softmax, weighted sum. q is scaled already; scores has room for
// H rows of `stride` floats. sinks [H] (may be null) are further scores in the softmax, whose values are zero.
template <typename T, int ND, int H>
void attend_heads(const float* q, const T* keys, const T* values, int64_t count, float* scores, int64_t stride,
                  const float* sinks, T* out) {
    constexpr int D = ND * W;
    float top[H];
    for (int h = 0; h < H; ++h) top[h] = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
    for (int64_t t = 0; t < count; ++t) {
        vf k[ND];
        for (int d = 0; d < ND; ++d) k[d] = load(keys + t * D + d * W);
        for (int h = 0; h < H; ++h) {
            vf acc = load(q + h * D) * k[0];
            for (int d = 1; d < ND; ++d) acc += load(q + h * D + d * W) * k[d];
            const float s = sum(acc);
            scores[h * stride + t] = s;
            top[h] = s > top[h] ? s : top[h];
        }
    }
    float inverse[H];
    for (int h = 0; h < H; ++h) {
        float* row = scores + h * stride;
        for (int64_t t = count; t % W; ++t) row[t] = -std::numeric_limits<float>::infinity();
        vf total = {};
        for (int64_t t = 0; t < count; t += W) {
            vf e = vexp(load(row + t) - top[h]);
            store(row + t, e);
            total += e;
        }
        inverse[h] = 1.0f / (sum(total) + (sinks ? std::exp(sinks[h] - top[h]) : 0.0f));
    }
    vf acc[H][ND] = {};
    for (int64_t t = 0; t < count; ++t) {
        vf v[ND];
        for (int d = 0; d < ND; ++d) v[d] = load(values + t * D + d * W);
        for (int h = 0; h < H; ++h)
            for (int d = 0; d < ND; ++d) acc[h][d] += scores[h * stride + t] * v[d];
    }
    for (int h = 0; h < H; ++h)
        for (int d = 0; d < ND; ++d) store(out + h * D + d * W, acc[h][d] * inverse[h]);
}

template <typename T, int ND>
void attend_group(const float* q, int64_t heads, const T* keys, const T* values, int64_t count, float* scores,
                  int64_t stride, const float* sinks, T* out) {
    constexpr int D = ND * W;
    const auto sink = [&](int64_t h) { return sinks ? sinks + h : nullptr; };
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4)
        attend_heads<T, ND, 4>(q + h * D, keys, values, count, scores, stride, sink(h), out + h * D);
    for (; h + 2 <= heads; h += 2)
        attend_heads<T, ND, 2>(q + h * D, keys, values, count, scores, stride, sink(h), out + h * D);
    for (; h < heads; ++h)
        attend_heads<T, ND, 1>(q + h * D, keys, values, count, scores, stride, sink(h), out + h * D);
}

struct Attention {
    int64_t rows, groups, heads, length, window, half, stride_qkv;
    float scale, eps;
    const float* sinks;  // [groups * heads], or null
};

template <typename T, int ND>
void attend_rows(const T* qkv, const float* norm, const T* cos, const T* sin, T* keys, T* values, const int64_t* positions,
                 T* out, const Attention& a) {
    constexpr int D = ND * W;
#pragma omp parallel
    {
        const int64_t stride = (a.length + W) / W * W;
        std::vector<float> q(a.heads * D), k(D), scores(4 * stride);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.rows * a.groups; ++task) {
            const int64_t row = task / a.groups, position = positions[row];
            const T* in = qkv + row * a.stride_qkv + task % a.groups * (a.heads + 2) * D;
            const T* c = cos + row * a.half;
            const T* s = sin + row * a.half;
            for (int64_t h = 0; h < a.heads; ++h) {
                prepare_head(in + h * D, norm, c, s, a.half, a.eps, D, q.data() + h * D);
                for (int d = 0; d < D; d += W) store(&q[h * D + d], load(&q[h * D + d]) * a.scale);
            }
            prepare_head(in + a.heads * D, norm ? norm + D : nullptr, c, s, a.half, a.eps, D, k.data());
            T* key = keys + task * a.length * D;
            T* value = values + task * a.length * D;
            for (int d = 0; d < D; d += W) store(key + position * D + d, load(&k[d]));
            std::memcpy(value + position * D, in + (a.heads + 1) * D, D * sizeof(T));
            const int64_t first = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
            attend_group<T, ND>(q.data(), a.heads, key + first * D, value + first * D, position + 1 - first,
                                scores.data(), stride, a.sinks ? a.sinks + task % a.groups * a.heads : nullptr,
                                out + task * a.heads * D);
        }
    }
}

template <typename T>
int attend(const void* qkv, const float* norm, const void* cos, const void* sin, void* keys, void* values,
           const int64_t* positions, void* out, int64_t head_dim, const Attention& a) {
#define CASE(ND)                                                                                                  \
    case ND:                                                                                                      \
        attend_rows<T, ND>((const T*)qkv, norm, (const T*)cos, (const T*)sin, (T*)keys, (T*)values,     \
                           positions, (T*)out, a);                                                                \
        return 0;
    switch (head_dim / W) {
        SIZES
    }
#undef CASE
    return 1;
}

// Causal attention of each sequence of a packed stream to itself, for training. q, out, dout, dq: [tokens, groups * heads,
// D]; k, v, dk, dv: [tokens, groups, D]; lse: [tokens, groups * heads], log of the sum of exp of a query's scores.
struct Stream {
    const int64_t* starts;  // [sequences + 1]
    int64_t sequences, groups, heads, longest;
    float scale;
};

template <int ND>
inline float dot(const float* a, const float* b) {
    vf acc = load(a) * load(b);
    for (int d = 1; d < ND; ++d) acc += load(a + d * W) * load(b + d * W);
    return sum(acc);
}
template <int ND>
inline void add_scaled(float* to, float factor, const float* from) {
    for (int d = 0; d < ND; ++d) store(to + d * W, load(to + d * W) + factor * load(from + d * W));
}
// Rows of one head of `x` [.., width, D] as fp32 [count, D], times `factor`; and back.
template <typename T, int ND>
void gather(const T* x, int64_t count, int64_t width, float factor, float* out) {
    for (int64_t i = 0; i < count; ++i)
        for (int d = 0; d < ND * W; d += W) store(out + i * ND * W + d, load(x + i * width * ND * W + d) * factor);
}
template <typename T, int ND>
void scatter(const float* x, int64_t count, int64_t width, float factor, T* out) {
    for (int64_t i = 0; i < count; ++i)
        for (int d = 0; d < ND * W; d += W) store(out + i * width * ND * W + d, load(x + i * ND * W + d) * factor);
}
// exp(scores[j] - shift) in place for j < count; the rest of the last vector becomes 0. Returns the sum.
inline float exp_row(float* scores, int64_t count, float shift) {
    for (int64_t j = count; j % W; ++j) scores[j] = -std::numeric_limits<float>::infinity();
    vf total = {};
    for (int64_t j = 0; j < count; j += W) {
        const vf raw = load(scores + j);
        const vf e = raw < -1e30f ? vf{} : vexp(raw - shift);
        store(scores + j, e);
        total += e;
    }
    return sum(total);
}

template <typename T, int ND>
void stream_forward(const T* q, const T* k, const T* v, T* out, float* lse, const Stream& s) {
    constexpr int D = ND * W;
    const int64_t all = s.groups * s.heads;
#pragma omp parallel
    {
        std::vector<float> keys(s.longest * D), values(s.longest * D), query(D), result(D), row(s.longest + W);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.sequences * s.groups; ++task) {
            const int64_t first = s.starts[task / s.groups], count = s.starts[task / s.groups + 1] - first;
            const int64_t group = task % s.groups;
            gather<T, ND>(k + (first * s.groups + group) * D, count, s.groups, 1.0f, keys.data());
            gather<T, ND>(v + (first * s.groups + group) * D, count, s.groups, 1.0f, values.data());
            for (int64_t i = 0; i < count; ++i)
                for (int64_t h = 0; h < s.heads; ++h) {
                    const int64_t place = (first + i) * all + group * s.heads + h;
                    gather<T, ND>(q + place * D, 1, 1, s.scale, query.data());
                    float top = -std::numeric_limits<float>::infinity();
                    for (int64_t j = 0; j <= i; ++j) {
                        row[j] = dot<ND>(query.data(), &keys[j * D]);
                        top = row[j] > top ? row[j] : top;
                    }
                    const float total = exp_row(row.data(), i + 1, top);
                    std::fill(result.begin(), result.end(), 0.0f);
                    for (int64_t j = 0; j <= i; ++j) add_scaled<ND>(result.data(), row[j], &values[j * D]);
                    scatter<T, ND>(result.data(), 1, 1, 1.0f / total, out + place * D);
                    lse[place] = top + std::log(total);
                }
        }
    }
}

template <typename T, int ND>
void stream_backward(const T* q, const T* k, const T* v, const T* out, const float* lse, const T* dout, T* dq, T* dk,
                     T* dv, const Stream& s) {
    constexpr int D = ND * W;
    const int64_t all = s.groups * s.heads;
#pragma omp parallel
    {
        std::vector<float> keys(s.longest * D), values(s.longest * D), dkeys(s.longest * D), dvalues(s.longest * D);
        std::vector<float> query(D), up(D), result(D), dquery(D), row(s.longest + W);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.sequences * s.groups; ++task) {
            const int64_t first = s.starts[task / s.groups], count = s.starts[task / s.groups + 1] - first;
            const int64_t group = task % s.groups, shared = (first * s.groups + group) * D;
            gather<T, ND>(k + shared, count, s.groups, 1.0f, keys.data());
            gather<T, ND>(v + shared, count, s.groups, 1.0f, values.data());
            std::fill(dkeys.begin(), dkeys.end(), 0.0f);
            std::fill(dvalues.begin(), dvalues.end(), 0.0f);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t h = 0; h < s.heads; ++h) {
                    const int64_t place = (first + i) * all + group * s.heads + h;
                    gather<T, ND>(q + place * D, 1, 1, s.scale, query.data());
                    gather<T, ND>(dout + place * D, 1, 1, 1.0f, up.data());
                    gather<T, ND>(out + place * D, 1, 1, 1.0f, result.data());
                    const float mean = dot<ND>(up.data(), result.data());
                    for (int64_t j = 0; j <= i; ++j) row[j] = dot<ND>(query.data(), &keys[j * D]);
                    exp_row(row.data(), i + 1, lse[place]);
                    std::fill(dquery.begin(), dquery.end(), 0.0f);
                    for (int64_t j = 0; j <= i; ++j) {
                        const float slope = row[j] * (dot<ND>(up.data(), &values[j * D]) - mean);
                        add_scaled<ND>(&dvalues[j * D], row[j], up.data());
                        add_scaled<ND>(&dkeys[j * D], slope, query.data());
                        add_scaled<ND>(dquery.data(), slope, &keys[j * D]);
                    }
                    scatter<T, ND>(dquery.data(), 1, 1, s.scale, dq + place * D);
                }
            scatter<T, ND>(dkeys.data(), count, s.groups, 1.0f, dk + shared);
            scatter<T, ND>(dvalues.data(), count, s.groups, 1.0f, dv + shared);
        }
    }
}

template <typename T>
int stream(const void* const* x, float* lse, int64_t head_dim, const Stream& s) {
    const T *q = (const T*)x[0], *k = (const T*)x[1], *v = (const T*)x[2], *dout = (const T*)x[4];
    T *out = (T*)x[3], *dq = (T*)x[5], *dk = (T*)x[6], *dv = (T*)x[7];
#define CASE(ND)                                                                                                  \
    case ND:                                                                                                      \
        if (dout)                                                                                                 \
            stream_backward<T, ND>(q, k, v, out, lse, dout, dq, dk, dv, s);                                       \
        else                                                                                                      \
            stream_forward<T, ND>(q, k, v, out, lse, s);                                                          \
        return 0;
    switch (head_dim / W) {
        SIZES
    }
#undef CASE
    return 1;
}

template <typename T>
void add_norm(T* hidden, const T* delta, const float* weight, T* out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i)
        add_norm_row(hidden + i * dim, delta ? delta + i * dim : nullptr, weight, out + i * dim, dim, eps);
}

// Gradients of out = x / rms(x) * weight. With n = x / rms and a = dy * weight: dx = (a - n * mean(a * n)) / rms; the
// row's dy * n is added to `dweight`. One row.
template <typename T>
void norm_backward_row(const T* x, const T* dy, const float* weight, T* dx, float* dweight, int64_t dim, float eps) {
    vf squares = {}, along = {};
    for (int64_t i = 0; i < dim; i += W) {
        const vf v = load(x + i);
        squares += v * v;
        along += v * load(dy + i) * load(weight + i);
    }
    const float inverse = 1.0f / std::sqrt(sum(squares) / dim + eps);
    const float slope = sum(along) * inverse * inverse / dim;
    for (int64_t i = 0; i < dim; i += W) {
        const vf v = load(x + i), up = load(dy + i);
        store(dx + i, (up * load(weight + i) - v * slope) * inverse);
        store(dweight + i, load(dweight + i) + up * v * inverse);
    }
}

// dweight [threads, dim] holds zeros; each thread sums the same rows in the same order in every call.
template <typename T>
void norm_backward(const T* x, const T* dy, const float* weight, T* dx, float* dweight, int64_t rows, int64_t dim,
                   int64_t threads, float eps) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < threads; ++part)
        for (int64_t i = rows * part / threads; i < rows * (part + 1) / threads; ++i)
            norm_backward_row(x + i * dim, dy + i * dim, weight, dx + i * dim, dweight + part * dim, dim, eps);
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T* gate = gate_up + 2 * i * width;
        for (int64_t j = 0; j < width; j += W) {
            vf g = load(gate + j);
            store(out + i * width + j, g / (1.0f + vexp(-g)) * load(gate + width + j));
        }
    }
}

// Gradient of silu(gate) * up, both halves of a row of gate_up.
template <typename T>
void silu_mul_backward(const T* gate_up, const T* grad, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T* gate = gate_up + 2 * i * width;
        T* dgate = out + 2 * i * width;
        for (int64_t j = 0; j < width; j += W) {
            const vf g = load(gate + j), up = load(grad + i * width + j);
            const vf share = 1.0f / (1.0f + vexp(-g));
            store(dgate + j, up * load(gate + width + j) * share * (1.0f + g * (1.0f - share)));
            store(dgate + width + j, up * g * share);
        }
    }
}

}  // namespace

extern "C" {

int megarl_attend(int is_bf16, const void* qkv, const float* norm, const void* cos, const void* sin, void* keys,
                  void* values, const int64_t* positions, void* out, const float* sinks, int64_t rows, int64_t groups,
                  int64_t heads, int64_t head_dim, int64_t length, int64_t window, int64_t half, float scale,
                  float eps) {
    const Attention a{rows, groups, heads, length, window, half, groups * (heads + 2) * head_dim, scale, eps, sinks};
    return is_bf16 ? attend<bf16>(qkv, norm, cos, sin, keys, values, positions, out, head_dim, a)
                   : attend<float>(qkv, norm, cos, sin, keys, values, positions, out, head_dim, a);
}

// x: q, k, v, out, dout, dq, dk, dv; forward (writes out and lse) when dout is null, backward (reads them) otherwise.
int megarl_stream(int is_bf16, const void* const* x, float* lse, const int64_t* starts, int64_t sequences, int64_t groups,
                  int64_t heads, int64_t head_dim, int64_t longest, float scale) {
    const Stream s{starts, sequences, groups, heads, longest, scale};
    return is_bf16 ? stream<bf16>(x, lse, head_dim, s) : stream<float>(x, lse, head_dim, s);
}

void megarl_add_norm(int is_bf16, void* hidden, const void* delta, const float* weight, void* out, int64_t rows,
                     int64_t dim, float eps) {
    if (is_bf16)
        add_norm((bf16*)hidden, (const bf16*)delta, weight, (bf16*)out, rows, dim, eps);
    else
        add_norm((float*)hidden, (const float*)delta, weight, (float*)out, rows, dim, eps);
}

void megarl_norm_backward(int is_bf16, const void* x, const void* dy, const float* weight, void* dx, float* dweight,
                          int64_t rows, int64_t dim, int64_t threads, float eps) {
    if (is_bf16)
        norm_backward((const bf16*)x, (const bf16*)dy, weight, (bf16*)dx, dweight, rows, dim, threads,
                      eps);
    else
        norm_backward((const float*)x, (const float*)dy, weight, (float*)dx, dweight, rows, dim, threads,
                      eps);
}

void megarl_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t width) {
    if (is_bf16)
        silu_mul((const bf16*)gate_up, (bf16*)out, rows, width);
    else
        silu_mul((const float*)gate_up, (float*)out, rows, width);
}

void megarl_silu_mul_backward(int is_bf16, const void* gate_up, const void* grad, void* out, int64_t rows,
                              int64_t width) {
    if (is_bf16)
        silu_mul_backward((const bf16*)gate_up, (const bf16*)grad, (bf16*)out, rows, width);
    else
        silu_mul_backward((const float*)gate_up, (const float*)grad, (float*)out, rows, width);
}
}
