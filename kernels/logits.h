// What is computed from rows of logits. See CpuKernels.statistics, gradients and draw.

#pragma once

#include "lanes.h"

namespace {

// A sum over a row runs over blocks of columns, in
// an order that depends on the number of columns only.
struct Vocabulary {
    int64_t rows, columns, stride, start;
    float inverse_temperature;
};

constexpr int64_t BLOCK = 64 * W;  // columns whose fp32 sums are added to a sum in double

// 16 logits from column `at` on, divided by the temperature; `fill` for columns after the last.
template <typename T>
inline vf logits_at(const T* row, int64_t at, const Vocabulary& v, float fill) {
    if (at + W <= v.columns) return load(row + at) * v.inverse_temperature;
    T box[W] = {};
    std::memcpy(box, row + at, (v.columns - at) * sizeof(T));
    vf x = load(box) * v.inverse_temperature;
    for (int64_t i = v.columns - at; i < W; ++i) x[i] = fill;
    return x;
}

template <typename T>
float peak_of(const T* row, const Vocabulary& v) {
    vf top = splat(LOWEST);
    for (int64_t j = 0; j < v.columns; j += W) {
        const vf x = logits_at(row, j, v, LOWEST);
        top = x > top ? x : top;
    }
    return largest(top);
}

// The sums of exp(x - peak) and, if wanted, of exp(x - peak) (x - peak) over a row; 0 for a row whose logits are all -infinity.
template <bool WEIGHTED, typename T>
void exp_sums(const T* row, float peak, const Vocabulary& v, double& total, double& weighted) {
    const float shift = peak == LOWEST ? 0.0f : peak;
    total = weighted = 0;
    for (int64_t begin = 0; begin < v.columns; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, v.columns);
        vf sums = {}, products = {};
        for (int64_t j = begin; j < end; j += W) {
            const vf x = logits_at(row, j, v, LOWEST) - shift;
            const vf e = x < -87.0f ? vf{} : vexp(x);
            sums += e;
            if (WEIGHTED) products += x < -87.0f ? vf{} : e * x;
        }
        total += sum(sums);
        if (WEIGHTED) weighted += sum(products);
    }
}

template <typename T>
inline float logit_of(const T* row, int64_t target, const Vocabulary& v) {
    const int64_t column = target - v.start;
    if (column < 0 || column >= v.columns) return 0.0f;
    return logits_at(row, column / W * W, v, 0.0f)[column % W];
}

template <typename T>
void statistics(const T* logits, const int64_t* targets, float* out, int64_t out_stride, int with_entropy,
                const Vocabulary& v) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < v.rows; ++i) {
        const T* row = logits + i * v.stride;
        const float peak = peak_of(row, v);
        double total, weighted;
        if (with_entropy)
            exp_sums<true>(row, peak, v, total, weighted);
        else
            exp_sums<false>(row, peak, v, total, weighted);
        out[i] = peak;
        out[out_stride + i] = total;
        if (with_entropy) out[2 * out_stride + i] = weighted;
        out[3 * out_stride + i] = logit_of(row, targets[i], v);
    }
}

// Any of entropy, grad_logp and grad_entropy may be null.
template <typename T, typename O>
void gradients(const T* logits, const int64_t* targets, const float* log_z, const float* entropy, const float* grad_logp,
               const float* grad_entropy, O* out, const Vocabulary& v) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < v.rows; ++i) {
        const T* row = logits + i * v.stride;
        O* to = out + i * v.columns;
        const float up = grad_logp ? grad_logp[i] : 0.0f;
        const float slope = grad_entropy && entropy ? grad_entropy[i] : 0.0f, mean = entropy ? entropy[i] : 0.0f;
        const auto gradient = [&](int64_t j) {
            const vf logp = logits_at(row, j, v, 0.0f) - log_z[i];
            const vf change = vexp(logp) * -v.inverse_temperature * (up + slope * (logp + mean));
            return logp < -87.0f ? vf{} : change;  // 0, not 0 times infinity, for a logit of -infinity
        };
        int64_t j = 0;
        for (; j + W <= v.columns; j += W) store(to + j, gradient(j));
        if (j < v.columns) {
            O box[W];
            store(box, gradient(j));
            std::memcpy(to + j, box, (v.columns - j) * sizeof(O));
        }
        const int64_t column = targets[i] - v.start;
        if (grad_logp && column >= 0 && column < v.columns) {
            O box[W];
            store(box, gradient(column / W * W) + up * v.inverse_temperature);
            to[column] = box[column % W];
        }
    }
}

inline uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
inline vu mix32(vu x) {  // lowbias32
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// log E of models/noise.py: the logarithm of an exponential number. log(1 - u) with the error of rounding 1 - u taken out.
inline vf log_noise(uint64_t key, vu ids) {
    const vu bits = mix32(mix32((ids * 0x9E3779B9u) ^ uint32_t(key)) + uint32_t(key >> 32)) & 0x7fffffffu;
    vf u = (__builtin_convertvector((vi)bits, vf) + 0.5f) * 4.656612873077393e-10f;
    u = u > 1.0f - 5.960464477539063e-08f ? splat(1.0f - 5.960464477539063e-08f) : u;
    const vf rest = 1.0f - u;
    return vlog(((rest - 1.0f) + u) / rest - vlog(rest));
}

template <typename T>
void draw(const T* logits, const int64_t* seeds, const int64_t* index, double* out, const Vocabulary& v) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < v.rows; ++i) {
        const T* row = logits + i * v.stride;
        const bool race = seeds != nullptr;
        const uint64_t key = race ? mix64(mix64(uint64_t(seeds[i]) + 0x9E3779B97F4A7C15u) + uint64_t(index[i])) : 0;
        vu lanes;
        for (int l = 0; l < W; ++l) lanes[l] = l;
        const float peak = peak_of(row, v);
        double total, unused;
        exp_sums<false>(row, peak, v, total, unused);
        vf best = splat(LOWEST);
        vi winner = {};
        for (int64_t j = 0; j < v.columns; j += W) {
            const vu here = lanes + uint32_t(j);
            vf score = logits_at(row, j, v, LOWEST);
            if (race) score -= log_noise(key, here + uint32_t(v.start));
            winner = score > best ? (vi)here : winner;
            best = score > best ? score : best;
        }
        int64_t lane = 0;
        for (int l = 1; l < W; ++l)
            if (best[l] > best[lane] || (best[l] == best[lane] && winner[l] < winner[lane])) lane = l;
        const int64_t column = winner[lane];
        double* to = out + 4 * i;
        to[0] = best[lane];
        to[1] = v.start + column;
        to[2] = logits_at(row, column / W * W, v, LOWEST)[column % W];
        to[3] = peak + std::log(total);
    }
}

}  // namespace
