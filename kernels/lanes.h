// Vectors of 16 floats, whatever the machine; the compiler splits them where it has to.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
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
// The bits of the nearest bf16 numbers, ties to even; rounding must not carry a NaN with all bits set over to 0.
inline vu bf16_bits(vf x) {
    const vu u = (vu)x;
    const vu nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return x == x ? nearest : vu{} + 0x7fc0u;
}
inline void store(bf16* p, vf x) {
    const vu u = bf16_bits(x);
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

inline float largest(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int i = 1; i < W; ++i) top = x[i] > top ? x[i] : top;
    return top;
#endif
}
inline float sum(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < W; ++i) total += x[i];
    return total;
#endif
}

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

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

// log(x) for normal x > 0 to 2 ulp: the exponent, and a polynomial on [sqrt(1/2), sqrt(2)] (Cephes' coefficients).
inline vf vlog(vf x) {
    const vi bits = (vi)x;
    vi e = ((bits - 0x3f3504f3) >> 23);  // sqrt(1/2)'s bits: the mantissa ends up on [sqrt(1/2), sqrt(2)]
    const vf m = (vf)(bits - (e << 23)) - 1.0f;
    vf p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const vf square = m * m, n = __builtin_convertvector(e, vf);
    return m - 0.5f * square + (p * square * m + n * -2.12194440e-4f) + n * 0.693359375f;
}

}  // namespace
