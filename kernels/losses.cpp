// Losses of single tokens and their derivatives in one pass over float32 inputs. See losses.py for the reference.
//
// Vectors are 16 floats wide whatever the machine. Each block of tokens has its own statistics, summed in double by the
// caller, so that threads share nothing.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int W = 16;
constexpr float INF = std::numeric_limits<float>::infinity();
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

inline vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline vi load_mask(const uint8_t* p) {  // -1 where set
    int32_t wide[W];  // a loop, because GCC 12 makes slow code of __builtin_convertvector from bytes
    for (int i = 0; i < W; ++i) wide[i] = p[i];
    vi x;
    std::memcpy(&x, wide, sizeof x);
    return x != 0;
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf splat(float x) { return x - vf{}; }
inline vf clamp(vf x, float low, float high) {
    x = x < low ? splat(low) : x;
    return x > high ? splat(high) : x;
}
inline double total(vf x) {
    double sum = 0;
    for (int i = 0; i < W; ++i) sum += x[i];
    return sum;
}
inline double total(vi x) {
    double sum = 0;
    for (int i = 0; i < W; ++i) sum += x[i];
    return sum;
}

// exp(x) for |x| <= 20 to 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' coefficients).
inline vf vexp(vf x) {
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

template <bool Dual>
struct Ppo {
    static constexpr int STATS = 7;  // tokens, -sum d, sum r, least r, most r, clipped, stopped by the dual clip
    float low, high, dual;
    vf d_sum{}, r_sum{}, least = splat(INF), most = splat(-INF);
    vi count{}, clipped{}, stopped{};

    void step(vi mask, vf logp, vf old, vf advantage, float* loss_out, float* slope_out) {
        vf raw = mask ? logp - old : vf{};
        vf d = clamp(raw, -20.0f, 20.0f);
        vf r = vexp(d);
        vf cost = mask ? -advantage : vf{};  // where it is zero, nothing below is cut or over
        vf plain = cost * r, bounded = cost * clamp(r, 1 - low, 1 + high);
        vi cut = bounded > plain;
        vf loss = cut ? bounded : plain;
        vi flat = cut | (raw > 20.0f) | (raw < -20.0f);
        if constexpr (Dual) {
            vf ceiling = cost * dual;
            vi over = (cost > 0.0f) & (ceiling < loss);
            loss = over ? ceiling : loss;
            flat |= over;
            stopped -= over;
        }
        store(loss_out, loss);
        store(slope_out, flat ? vf{} : plain);
        d_sum += d;
        r_sum += mask ? r : vf{};
        vf low_r = mask ? r : splat(INF), high_r = mask ? r : splat(-INF);
        least = low_r < least ? low_r : least;
        most = high_r > most ? high_r : most;
        count -= mask;
        clipped -= cut;
    }

    void finish(double* out) const {
        float small = least[0], large = most[0];
        for (int i = 1; i < W; ++i) small = std::min(small, least[i]), large = std::max(large, most[i]);
        const double all[STATS] = {total(count), -total(d_sum), total(r_sum),  small,
                                   large,        total(clipped), total(stopped)};
        std::copy(all, all + STATS, out);
    }
};

struct Value {
    static constexpr int STATS = 3;  // tokens, sum of values, clipped
    float clip;                      // < 0: none
    vf v_sum{};
    vi count{}, clipped{};

    void step(vi mask, vf value, vf old, vf target, float* loss_out, float* slope_out) {
        vf v = mask ? value : vf{}, error = mask ? value - target : vf{};
        vf loss = error * error, slope = error;
        if (clip >= 0) {
            vf low = old - clip, high = old + clip;
            vf near = v < low ? low : v;
            near = near > high ? high : near;
            vf other = mask ? near - target : vf{};
            vf bounded = other * other;
            vi cut = bounded > loss;
            loss = cut ? bounded : loss;
            slope = cut ? vf{} : slope;
            clipped -= cut & mask;
        }
        store(loss_out, loss * 0.5f);
        store(slope_out, slope);
        v_sum += v;
        count -= mask;
    }

    void finish(double* out) const {
        out[0] = total(count);
        out[1] = total(v_sum);
        out[2] = total(clipped);
    }
};

template <typename Term>
void run(Term term, const float* x, const float* y, const float* z, const uint8_t* mask, int64_t n, int64_t block,
         float* loss, float* slope, double* stats) {
    const int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; ++b) {
        Term t = term;
        const int64_t end = std::min(n, (b + 1) * block);
        int64_t i = b * block;
        for (; i + W <= end; i += W) t.step(load_mask(mask + i), load(x + i), load(y + i), load(z + i), loss + i, slope + i);
        if (i < end) {  // the rest, in a vector of its own whose other places are masked
            float in[3][W] = {}, out[2][W];
            uint8_t valid[W] = {};
            const size_t left = (end - i) * sizeof(float);
            std::memcpy(in[0], x + i, left), std::memcpy(in[1], y + i, left), std::memcpy(in[2], z + i, left);
            std::memcpy(valid, mask + i, end - i);
            t.step(load_mask(valid), load(in[0]), load(in[1]), load(in[2]), out[0], out[1]);
            std::memcpy(loss + i, out[0], left), std::memcpy(slope + i, out[1], left);
        }
        t.finish(stats + b * Term::STATS);
    }
}

}  // namespace

extern "C" {

void megarl_ppo_loss(const float* logp, const float* old, const float* advantages, const uint8_t* mask, int64_t n,
                     int64_t block, float* loss, float* slope, double* stats, float low, float high, float dual) {
    const auto go = [&](auto term) {
        term.low = low, term.high = high, term.dual = dual;
        run(term, logp, old, advantages, mask, n, block, loss, slope, stats);
    };
    dual > 0 ? go(Ppo<true>{}) : go(Ppo<false>{});
}

void megarl_value_loss(const float* values, const float* old, const float* returns, const uint8_t* mask, int64_t n,
                       int64_t block, float* loss, float* slope, double* stats, float clip) {
    Value term{};
    term.clip = clip;
    run(term, values, old, returns, mask, n, block, loss, slope, stats);
}
}
