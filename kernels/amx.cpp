// Products of bfloat16 matrices on a CPU with AMX, whose sums are fp32. See amx.py.
//
// A tile has 16 rows of 64 bytes. `_tile_dpbf16ps` adds to 16 x 16 sums the product of a tile of 16 x 32 numbers and a tile of
// 32 x 16, whose rows come in pairs: number (2 p + h, c) is at [p][2 c + h]. Rows and columns that are multiples of 32 are
// checked by the caller.

#ifndef __AMX_BF16__
#error "this compiler cannot use the processor's AMX: set CXX to the path of a newer one (GCC 11, Clang 12)"
#else

#include <cstdlib>
#include <memory>

#include "lanes.h"

namespace {

constexpr int64_t TILE = 512;  // numbers of a tile

struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Eight full tiles for this thread; what other libraries had set, and take for granted, is set again at the end.
class Tiles {
    Shapes before;

  public:
    Tiles() {
        const Shapes full;
        _tile_storeconfig(&before);
        _tile_loadconfig(&full);
    }
    ~Tiles() {
        if (before.palette)
            _tile_loadconfig(&before);
        else
            _tile_release();
    }
};

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<bf16[], Free>;
Buffer buffer(int64_t tiles) { return Buffer((bf16*)std::aligned_alloc(64, std::max<int64_t>(1, tiles) * TILE * 2)); }

inline void transpose(__m512i r[16]) {  // 16 x 16 numbers of 32 bits
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            r[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + h + 2]);
            r[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + h + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
            t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    }
}

// The tile of up to 32 rows and 16 columns of `x`, its rows in pairs; rows after the last are zeros.
inline void pair_rows(const bf16* x, int64_t stride, int64_t rows, __m512i r[16]) {
    for (int p = 0; p < 16; ++p) {
        const __m256i none = _mm256_setzero_si256();
        const __m256i a = 2 * p < rows ? _mm256_loadu_si256((const __m256i*)(x + 2 * p * stride)) : none;
        const __m256i b = 2 * p + 1 < rows ? _mm256_loadu_si256((const __m256i*)(x + (2 * p + 1) * stride)) : none;
        r[p] = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
    }
}
inline void write(const __m512i r[16], bf16* out) {
    for (int i = 0; i < 16; ++i) _mm512_store_si512((__m512i*)(out + 32 * i), r[i]);
}

// The four sums of two row tiles and two column tiles over `count` tiles each, in tiles 0 to 3.
inline void multiply(const bf16* a0, const bf16* a1, const bf16* b0, const bf16* b1, int64_t a_step, int64_t b_step,
                     int64_t count, const char* next, int64_t next_bytes) {
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t line = 0; line < next_bytes; line += 64) _mm_prefetch(next + i * next_bytes + line, _MM_HINT_T0);
        _tile_loadd(4, a0 + i * a_step, 64);
        _tile_loadd(6, b0 + i * b_step, 64);
        _tile_loadd(7, b1 + i * b_step, 64);
        _tile_loadd(5, a1 + i * a_step, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

constexpr int64_t TOKENS = 1024, COLUMNS = 640;  // of a block, whose tiles stay in a core's cache
constexpr int64_t CACHED = 1 << 19;  // numbers in a block of tokens, whose tiles stay in a core's cache

// sums [n, k] += grad[t, n]^T x[t, k] for a block of tokens and columns.
void add_block(const bf16* grad, const bf16* x, float* sums, int64_t tokens, int64_t rows, int64_t columns, int64_t width) {
    const int64_t steps = (tokens + 31) / 32;
    const Buffer b = buffer(columns / 16 * steps);
#pragma omp parallel
    {
        const Tiles tiles;
        const Buffer a = buffer(2 * steps);
        __m512i r[16];
#pragma omp for schedule(static)
        for (int64_t k = 0; k < columns; k += 16)
            for (int64_t t = 0; t < steps; ++t) {
                pair_rows(x + 32 * t * width + k, width, tokens - 32 * t, r);
                write(r, &b[(k / 16 * steps + t) * TILE]);
            }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows; n += 32) {
            for (int64_t h = 0; h < 2; ++h)
                for (int64_t t = 0; t < steps; ++t) {
                    pair_rows(grad + 32 * t * rows + n + 16 * h, rows, tokens - 32 * t, r);
                    transpose(r);
                    write(r, &a[(h * steps + t) * TILE]);
                }
            for (int64_t k = 0; k < columns; k += 32) {
                float* out = sums + n * width + k;
                const bf16* b0 = &b[k / 16 * steps * TILE];
                const int64_t stride = width * 4;
                _tile_loadd(0, out, stride);
                _tile_loadd(1, out + 16, stride);
                _tile_loadd(2, out + 16 * width, stride);
                _tile_loadd(3, out + 16 * width + 16, stride);
                const bool more = k + 32 < columns || n + 32 < rows;  // sums of the next block come while this one is computed
                const float* next = k + 32 < columns ? out + 32 : sums + (n + 32) * width;
                for (int64_t i = 0; more && i < 32; ++i)
                    for (int64_t j = 0; j < 32; j += 16) _mm_prefetch((const char*)(next + i * width + j), _MM_HINT_T1);
                multiply(&a[0], &a[steps * TILE], b0, b0 + steps * TILE, TILE, TILE, steps, nullptr, 0);
                _tile_stored(0, out, stride);
                _tile_stored(1, out + 16, stride);
                _tile_stored(2, out + 16 * width, stride);
                _tile_stored(3, out + 16 * width + 16, stride);
            }
        }
    }
}

inline void store_row(const float* sums, const bf16* bias, int64_t count, bf16* out) {
    for (int64_t j = 0; j < count; j += W) store(out + j, bias ? load(sums + j) + load(bias + j) : load(sums + j));
}

// The tiles of up to `tokens` rows of x [tokens, width], two for each 32 rows; rows after the last are zeros.
void pack_rows(const bf16* x, int64_t tokens, int64_t width, bf16* out) {
    const int64_t steps = width / 32;
#pragma omp parallel for schedule(static) if (tokens > 32)
    for (int64_t t = 0; t < (tokens + 31) / 32 * 32; ++t)
        for (int64_t k = 0; k < steps; ++k) {
            bf16* to = out + (t / 16 * steps + k) * TILE + t % 16 * 32;
            if (t < tokens)
                std::memcpy(to, x + t * width + 32 * k, 64);
            else
                std::memset(to, 0, 64);
        }
}

// out [tokens, rows] = x [tokens, width] weight^T + bias for a block of tokens, whose tiles are in `a`.
void linear_block(const bf16* a, const bf16* packed, const bf16* bias, bf16* out, int64_t tokens, int64_t rows,
                  int64_t width) {
    const int64_t steps = width / 32;
#pragma omp parallel
    {
        const Tiles tiles;
        alignas(64) float sums[32 * 32];
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows; n += 32)
            for (int64_t t = 0; t < tokens; t += 32) {
                const bf16* b = packed + n * width;
                const bf16* a0 = a + t * width;
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                const char* ahead = (const char*)(b + 16 * TILE);  // a weight comes from memory: ask for it early
                multiply(a0, a0 + steps * TILE, b, b + TILE, TILE, 2 * TILE, steps, ahead, t ? 0 : 4 * TILE);
                _tile_stored(0, sums, 128);
                _tile_stored(1, sums + 16, 128);
                _tile_stored(2, sums + 16 * 32, 128);
                _tile_stored(3, sums + 16 * 32 + 16, 128);
                for (int64_t i = 0; i < std::min<int64_t>(32, tokens - t); ++i)
                    store_row(sums + 32 * i, bias ? bias + n : nullptr, 32, out + (t + i) * rows + n);
            }
    }
}

}  // namespace

extern "C" {

void megarl_amx_add_gradient(const void* grad, const void* x, float* sums, int64_t tokens, int64_t rows, int64_t width) {
    for (int64_t t = 0; t < tokens; t += TOKENS)
        for (int64_t k = 0; k < width; k += COLUMNS)
            add_block((const bf16*)grad + t * rows, (const bf16*)x + t * width + k, sums + k,
                      std::min(TOKENS, tokens - t), rows, std::min(COLUMNS, width - k), width);
}

// weight [rows, width] as tiles: for each 32 rows and each 32 columns the two tiles of 32 x 16 of the transposed weight.
void megarl_amx_pack(const void* weight, void* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < rows; n += 16) {
        __m512i r[16];
        for (int64_t k = 0; k < width; k += 32) {
            for (int i = 0; i < 16; ++i)
                r[i] = _mm512_loadu_si512((const bf16*)weight + (n + i) * width + k);
            transpose(r);
            write(r, (bf16*)out + ((n / 32 * (width / 32) + k / 32) * 2 + n / 16 % 2) * TILE);
        }
    }
}

// out [tokens, rows] = x [tokens, width] weight^T + bias.
void megarl_amx_linear(const void* x, const void* packed, const void* bias, void* out, int64_t tokens, int64_t rows,
                       int64_t width) {
    const int64_t most = std::max<int64_t>(32, CACHED / width / 32 * 32);
    const Buffer a = buffer((std::min(most, tokens) + 31) / 32 * 2 * (width / 32));
    for (int64_t t = 0; t < tokens; t += most) {
        const int64_t count = std::min(most, tokens - t);
        pack_rows((const bf16*)x + t * width, count, width, a.get());
        linear_block(a.get(), (const bf16*)packed, (const bf16*)bias, (bf16*)out + t * rows, count, rows, width);
    }
}
}

#endif
