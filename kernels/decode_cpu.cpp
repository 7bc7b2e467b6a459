// What a decode step does between its matmuls, for float and bfloat16 on a CPU. See decode_cpu.py for the reference.
//
// All sums run in fp32. Vectors are 16 floats wide whatever the machine; the compiler splits them where it has to.
// Sizes (head size, hidden size, MLP width) are multiples of 16, checked by the caller.

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
void add_norm_row(T* hidden, const T* delta, const T* weight, T* out, int64_t dim, float eps) {
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

// RMS norm (when weight is given) and rotary embedding of one head, into fp32. cos and sin hold D / 2 values.
template <typename T>
void prepare_head(const T* x, const T* weight, const T* cos, const T* sin, float eps, int64_t D, float* out) {
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
    const int64_t half = D / 2;
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
// H rows of `stride` floats.
template <typename T, int ND, int H>
void attend_heads(const float* q, const T* keys, const T* values, int64_t count, float* scores, int64_t stride, T* out) {
    constexpr int D = ND * W;
    float top[H];
    for (int h = 0; h < H; ++h) top[h] = -std::numeric_limits<float>::infinity();
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
        inverse[h] = 1.0f / sum(total);
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
                  int64_t stride, T* out) {
    constexpr int D = ND * W;
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) attend_heads<T, ND, 4>(q + h * D, keys, values, count, scores, stride, out + h * D);
    for (; h + 2 <= heads; h += 2) attend_heads<T, ND, 2>(q + h * D, keys, values, count, scores, stride, out + h * D);
    for (; h < heads; ++h) attend_heads<T, ND, 1>(q + h * D, keys, values, count, scores, stride, out + h * D);
}

struct Attention {
    int64_t rows, groups, heads, length, window, stride_qkv;
    float scale, eps;
};

template <typename T, int ND>
void attend_rows(const T* qkv, const T* norm, const T* cos, const T* sin, T* keys, T* values, const int64_t* positions,
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
            const T* c = cos + row * D / 2;
            const T* s = sin + row * D / 2;
            for (int64_t h = 0; h < a.heads; ++h) {
                prepare_head(in + h * D, norm, c, s, a.eps, D, q.data() + h * D);
                for (int d = 0; d < D; d += W) store(&q[h * D + d], load(&q[h * D + d]) * a.scale);
            }
            prepare_head(in + a.heads * D, norm ? norm + D : nullptr, c, s, a.eps, D, k.data());
            T* key = keys + task * a.length * D;
            T* value = values + task * a.length * D;
            for (int d = 0; d < D; d += W) store(key + position * D + d, load(&k[d]));
            std::memcpy(value + position * D, in + (a.heads + 1) * D, D * sizeof(T));
            const int64_t first = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
            attend_group<T, ND>(q.data(), a.heads, key + first * D, value + first * D, position + 1 - first,
                                scores.data(), stride, out + task * a.heads * D);
        }
    }
}

template <typename T>
int attend(const void* qkv, const void* norm, const void* cos, const void* sin, void* keys, void* values,
           const int64_t* positions, void* out, int64_t head_dim, const Attention& a) {
#define CASE(ND)                                                                                                  \
    case ND:                                                                                                      \
        attend_rows<T, ND>((const T*)qkv, (const T*)norm, (const T*)cos, (const T*)sin, (T*)keys, (T*)values,     \
                           positions, (T*)out, a);                                                                \
        return 0
    switch (head_dim / W) {
        CASE(1);
        CASE(2);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(8);
        CASE(16);
    }
#undef CASE
    return 1;
}

template <typename T>
void add_norm(T* hidden, const T* delta, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; ++i)
        add_norm_row(hidden + i * dim, delta ? delta + i * dim : nullptr, weight, out + i * dim, dim, eps);
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

}  // namespace

extern "C" {

int megarl_attend(int is_bf16, const void* qkv, const void* norm, const void* cos, const void* sin, void* keys,
                  void* values, const int64_t* positions, void* out, int64_t rows, int64_t groups, int64_t heads,
                  int64_t head_dim, int64_t length, int64_t window, float scale, float eps) {
    const Attention a{rows, groups, heads, length, window, groups * (heads + 2) * head_dim, scale, eps};
    return is_bf16 ? attend<bf16>(qkv, norm, cos, sin, keys, values, positions, out, head_dim, a)
                   : attend<float>(qkv, norm, cos, sin, keys, values, positions, out, head_dim, a);
}

void megarl_add_norm(int is_bf16, void* hidden, const void* delta, const void* weight, void* out, int64_t rows,
                     int64_t dim, float eps) {
    if (is_bf16)
        add_norm((bf16*)hidden, (const bf16*)delta, (const bf16*)weight, (bf16*)out, rows, dim, eps);
    else
        add_norm((float*)hidden, (const float*)delta, (const float*)weight, (float*)out, rows, dim, eps);
}

void megarl_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t width) {
    if (is_bf16)
        silu_mul((const bf16*)gate_up, (bf16*)out, rows, width);
    else
        silu_mul((const float*)gate_up, (float*)out, rows, width);
}
}
