// diff: lists the elements that differ between two versions of a tensor, and updates the older version. patch: writes
// such a list into another copy. Each is one pass; delta.py has the same functions in NumPy.
//
// Versions are compared in lines of 64 bytes. Only for a line that differs is a mask made, with a bit per element.

#include <cstdint>
#include <cstring>
#if defined(__AVX512BW__) && defined(__BMI2__)
#define WIDE
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t FAR = 255;  // the largest distance between two listed elements: it is stored in a byte

template <typename T>
uint64_t differing(const T* a, const T* b, int64_t n) {  // returns a mask: bit k is set if element k differs
#ifdef WIDE
    if (n == LINE / (int64_t)sizeof(T)) {
        // Compares bytes, and then merges the bits of each element's bytes. Comparing elements gives a mask of 16 or 32
        // bits, for which GCC 12 makes wrong code: it stores these bits on the stack and reads 64 bits back.
        uint64_t bytes = _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
        if (bytes == 0) return 0;  // most lines are equal
        if constexpr (sizeof(T) == 2) bytes = _pext_u64(bytes | bytes >> 1, 0x5555555555555555);
        if constexpr (sizeof(T) == 4) {
            bytes |= bytes >> 1;
            bytes = _pext_u64(bytes | bytes >> 2, 0x1111111111111111);
        }
        return bytes;
    }
#endif
    if (std::memcmp(a, b, n * sizeof(T)) == 0) return 0;
    uint64_t mask = 0;
    for (int64_t k = 0; k < n; ++k) mask |= (uint64_t)(a[k] != b[k]) << k;
    return mask;
}

template <typename T>
int64_t diff(T* base, const T* next, int64_t n, uint8_t* distances, T* values, int64_t room) {
    constexpr int64_t step = LINE / sizeof(T);
    int64_t count = 0, last = -1;
    for (int64_t i = 0; i < n; i += step) {
        const int64_t length = n - i < step ? n - i : step;
        uint64_t mask = differing(base + i, next + i, length);
        if (mask == 0) continue;
        std::memcpy(base + i, next + i, length * sizeof(T));
        for (; mask != 0; mask &= mask - 1) {
            const int64_t at = i + __builtin_ctzll(mask);
            if (room - count <= (at - last - 1) / FAR) return -1;
            for (; at - last > FAR; ++count) {  // too far for one distance: list an element that did not change
                last += FAR;
                distances[count] = FAR;
                values[count] = next[last];
            }
            distances[count] = (uint8_t)(at - last);
            values[count++] = next[at];
            last = at;
        }
    }
    return count;
}

template <typename T>
int64_t patch(T* base, int64_t n, const uint8_t* distances, const T* values, int64_t count) {
    int64_t at = -1;
    for (int64_t i = 0; i < count; ++i) at += distances[i];
    if (at >= n) return -1;
    at = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (distances[i] == 0) return -1;
        at += distances[i];
        base[at] = values[i];
    }
    return count;
}

}  // namespace

extern "C" int64_t megarl_diff(
    int64_t itemsize, void* base, const void* next, int64_t n, uint8_t* distances, void* values, int64_t room) {
    if (itemsize == 1) return diff((uint8_t*)base, (const uint8_t*)next, n, distances, (uint8_t*)values, room);
    if (itemsize == 2) return diff((uint16_t*)base, (const uint16_t*)next, n, distances, (uint16_t*)values, room);
    return diff((uint32_t*)base, (const uint32_t*)next, n, distances, (uint32_t*)values, room);
}

extern "C" int64_t megarl_patch(
    int64_t itemsize, void* base, int64_t n, const uint8_t* distances, const void* values, int64_t count) {
    if (itemsize == 1) return patch((uint8_t*)base, n, distances, (const uint8_t*)values, count);
    if (itemsize == 2) return patch((uint16_t*)base, n, distances, (const uint16_t*)values, count);
    return patch((uint32_t*)base, n, distances, (const uint32_t*)values, count);
}
