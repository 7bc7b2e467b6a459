// Attention of training streams, of sequences or of trees of shared prefixes. See CpuKernels.stream_forward.

#pragma once

#include <type_traits>
#include <vector>

#include "lanes.h"

namespace {

// Attention of a packed stream to itself, for training: a token sees its node up to itself, and all tokens of the nodes
// before its own. q, out, dout, dq: [tokens, groups * heads, D]; k, v, dk, dv: [tokens, groups, D]; lse: [tokens, groups *
// heads], log of the sum of exp of a query's scores. Nodes lie depth first; without parents each node is a sequence.
struct Stream {
    const int64_t *starts, *parents;  // [nodes + 1] and [nodes]; parents: -1 for a root; may be null
    int64_t nodes, groups, heads, threads;
    float scale;

    int64_t length(int64_t node) const { return starts[node + 1] - starts[node]; }
};

// Tokens before each node on its path, the most tokens of a path, and the first node of each tree (and, at the end, the
// number of nodes).
struct Paths {
    std::vector<int64_t> before, trees;
    int64_t longest = 0;

    explicit Paths(const Stream& s) : before(s.nodes) {
        for (int64_t i = 0; i < s.nodes; ++i) {
            const int64_t parent = s.parents ? s.parents[i] : -1;
            before[i] = parent < 0 ? 0 : before[parent] + s.length(parent);
            longest = std::max(longest, before[i] + s.length(i));
            if (parent < 0) trees.push_back(i);
        }
        trees.push_back(s.nodes);
    }
};

template <int ND>
inline float dot(const float* a, const float* b) {
    vf acc = load(a) * load(b);
    for (int d = 1; d < ND; ++d) acc += load(a + d * W) * load(b + d * W);
    return sum(acc);
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
// Rows [count, D] as columns of `out` [D, stride].
template <int ND>
void turn(const float* x, int64_t count, int64_t stride, float* out) {
    for (int64_t i = 0; i < count; ++i)
        for (int d = 0; d < ND * W; ++d) out[d * stride + i] = x[i * ND * W + d];
}
// exp(scores[j] - shift) in place for j < end, a multiple of 16; 0 for a score of -infinity. Returns the sum.
inline float exp_row(float* scores, int64_t end, float shift) {
    vf total = {};
    for (int64_t j = 0; j < end; j += W) {
        const vf raw = load(scores + j);
        const vf e = raw < -1e30f ? vf{} : vexp(raw - shift);
        store(scores + j, e);
        total += e;
    }
    return sum(total);
}
inline float largest_of(const float* scores, int64_t end) {
    vf top = load(scores);
    for (int64_t j = W; j < end; j += W) {
        const vf x = load(scores + j);
        top = x > top ? x : top;
    }
    return largest(top);
}

constexpr int64_t up16(int64_t n) { return (n + W - 1) / W * W; }
// Queries that are computed together: as many as leave their sums in registers.
template <int ND>
constexpr int ROWS = ND <= 4 ? 4 : ND <= 8 ? 2 : 1;

// out[r, j] = x[r] . columns[:, j] for j < end, a multiple of 16; `out` and `columns` have rows of `stride`.
template <int ND, int R>
void products(const float* x, const float* columns, int64_t stride, int64_t end, float* out) {
    constexpr int D = ND * W, J = 2;
    int64_t j = 0;
    const auto block = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        vf acc[R][V] = {};
        for (int d = 0; d < D; ++d) {
            vf c[V];
            for (int i = 0; i < V; ++i) c[i] = load(columns + d * stride + j + i * W);
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < V; ++i) acc[r][i] += x[r * D + d] * c[i];
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) store(out + r * stride + j + i * W, acc[r][i]);
        j += V * W;
    };
    while (j + J * W <= end) block(std::integral_constant<int, J>{});
    while (j < end) block(std::integral_constant<int, 1>{});
}
// out[r] = sum over j < count of factors[r, j] rows[j]; `factors` have rows of `stride`.
template <int ND, int R>
void weighted_rows(const float* factors, int64_t stride, const float* rows, int64_t count, float* out) {
    constexpr int D = ND * W;
    vf acc[R][ND] = {};
    for (int64_t j = 0; j < count; ++j)
        for (int d = 0; d < ND; ++d) {
            const vf x = load(rows + j * D + d * W);
            for (int r = 0; r < R; ++r) acc[r][d] += factors[r * stride + j] * x;
        }
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < ND; ++d) store(out + r * D + d * W, acc[r][d]);
}
// rows[j] += sum over r of factors[r, j] x[r] for j < count.
template <int ND, int R>
void add_rows(const float* factors, int64_t stride, const float* x, int64_t count, float* rows) {
    constexpr int D = ND * W;
    vf from[R][ND];
    for (int r = 0; r < R; ++r)
        for (int d = 0; d < ND; ++d) from[r][d] = load(x + r * D + d * W);
    for (int64_t j = 0; j < count; ++j)
        for (int d = 0; d < ND; ++d) {
            vf y = load(rows + j * D + d * W);
            for (int r = 0; r < R; ++r) y += factors[r * stride + j] * from[r][d];
            store(rows + j * D + d * W, y);
        }
}

// The tensors of a call; the last four are null in a forward pass.
template <typename T>
struct Tensors {
    const T *q, *k, *v;
    T* out;
    float* lse;
    const T* dout;
    T *dq, *dk, *dv;
};

// Query heads of a key head are divided into parts where trees and key heads are fewer than threads. Each part adds up
// its own gradients of keys and values, whose sum over the parts, in order, is written to dk and dv at the end.
struct Parts {
    int64_t count, rows, width;  // rows of `width` numbers: those of dk
    std::vector<float> dk, dv;   // [count, rows, width]; empty with a single part, which writes to the tensors

    Parts(const Stream& s, int64_t tasks, int64_t head_dim, bool backward)
        : count(std::clamp<int64_t>((s.threads + tasks - 1) / tasks, 1, s.heads)), rows(s.starts[s.nodes] * s.groups),
          width(head_dim) {
        if (count == 1 || !backward) return;
        for (auto* sums : {&dk, &dv}) sums->resize(count * rows * width);
    }
};

// One part of one key head's queries in one tree: the keys and values of the path to the current node, and their
// gradients so far.
template <typename T, int ND>
struct TreeAttention {
    static constexpr int D = ND * W;
    const Stream& s;
    const Paths& paths;
    const Tensors<T>& x;
    Parts& parts;
    const int64_t stride, all;
    std::vector<float> keys, values, key_columns, value_columns, dkeys, dvalues, scores, slopes;
    int64_t group = 0, part = 0, first_head = 0, heads = 0;

    TreeAttention(const Stream& s, const Paths& paths, const Tensors<T>& x, Parts& parts)
        : s(s), paths(paths), x(x), parts(parts), stride(up16(paths.longest)), all(s.groups * s.heads) {
        for (auto* rows : {&values, &keys}) rows->resize(paths.longest * D);
        key_columns.resize(D * stride);
        scores.resize(ROWS<ND> * stride);
        if (x.dout == nullptr) return;
        for (auto* rows : {&dkeys, &dvalues}) rows->resize(paths.longest * D);
        value_columns.resize(D * stride);
        slopes.resize(ROWS<ND> * stride);
    }

    void run(int64_t first_node, int64_t last_node, int64_t of_group, int64_t of_part) {
        group = of_group, part = of_part;
        first_head = s.heads * part / parts.count;
        heads = s.heads * (part + 1) / parts.count - first_head;
        std::vector<int64_t> open;  // nodes of the current path
        for (int64_t node = first_node; node < last_node; ++node) {
            const int64_t before = paths.before[node], count = s.length(node);
            while (!open.empty() && paths.before[open.back()] >= before) close(open);
            open.push_back(node);
            const int64_t place = (s.starts[node] * s.groups + group) * D;
            gather<T, ND>(x.k + place, count, s.groups, 1.0f, &keys[before * D]);
            gather<T, ND>(x.v + place, count, s.groups, 1.0f, &values[before * D]);
            turn<ND>(&keys[before * D], count, stride, &key_columns[before]);
            if (x.dout != nullptr) {
                turn<ND>(&values[before * D], count, stride, &value_columns[before]);
                std::fill_n(&dkeys[before * D], count * D, 0.0f);
                std::fill_n(&dvalues[before * D], count * D, 0.0f);
            }
            int64_t row = 0;
            for (; row + ROWS<ND> <= count * heads; row += ROWS<ND>) block<ROWS<ND>>(node, row);
            for (; row < count * heads; ++row) block<1>(node, row);
        }
        while (!open.empty()) close(open);
    }

    // Writes the gradients of the last open node, which no later node of the tree sees.
    void close(std::vector<int64_t>& open) {
        const int64_t node = open.back(), before = paths.before[node];
        open.pop_back();
        if (x.dout == nullptr) return;
        const int64_t place = (s.starts[node] * s.groups + group) * D;
        const auto write = [&](auto* dk, auto* dv) {
            scatter<std::remove_pointer_t<decltype(dk)>, ND>(&dkeys[before * D], s.length(node), s.groups, 1.0f, dk + place);
            scatter<std::remove_pointer_t<decltype(dv)>, ND>(&dvalues[before * D], s.length(node), s.groups, 1.0f, dv + place);
        };
        if (parts.count == 1)
            write(x.dk, x.dv);
        else
            write(&parts.dk[part * parts.rows * D], &parts.dv[part * parts.rows * D]);
    }

    // R queries of a node, counted over its tokens and the heads of this part.
    template <int R>
    void block(int64_t node, int64_t row) {
        int64_t places[R], counts[R];
        float queries[R * D];
        for (int r = 0; r < R; ++r) {
            const int64_t token = (row + r) / heads;
            places[r] = (s.starts[node] + token) * all + group * s.heads + first_head + (row + r) % heads;
            counts[r] = paths.before[node] + token + 1;
            gather<T, ND>(x.q + places[r] * D, 1, 1, s.scale, queries + r * D);
        }
        const int64_t end = up16(counts[R - 1]);
        products<ND, R>(queries, key_columns.data(), stride, end, scores.data());
        for (int r = 0; r < R; ++r) std::fill(&scores[r * stride + counts[r]], &scores[r * stride] + end, LOWEST);
        if (x.dout == nullptr)
            forward<R>(places, counts);
        else
            backward<R>(places, counts, queries);
    }

    template <int R>
    void forward(const int64_t* places, const int64_t* counts) {
        float inverse[R], result[R * D];
        for (int r = 0; r < R; ++r) {
            float* row = &scores[r * stride];
            const int64_t end = up16(counts[R - 1]);
            const float top = largest_of(row, end), total = exp_row(row, end, top);
            inverse[r] = 1.0f / total;
            x.lse[places[r]] = top + std::log(total);
        }
        weighted_rows<ND, R>(scores.data(), stride, values.data(), counts[R - 1], result);
        for (int r = 0; r < R; ++r) scatter<T, ND>(result + r * D, 1, 1, inverse[r], x.out + places[r] * D);
    }

    template <int R>
    void backward(const int64_t* places, const int64_t* counts, const float* queries) {
        float up[R * D], result[D], dqueries[R * D];
        for (int r = 0; r < R; ++r) gather<T, ND>(x.dout + places[r] * D, 1, 1, 1.0f, up + r * D);
        const int64_t most = counts[R - 1], end = up16(most);
        products<ND, R>(up, value_columns.data(), stride, end, slopes.data());
        for (int r = 0; r < R; ++r) {
            float *row = &scores[r * stride], *slope = &slopes[r * stride];
            exp_row(row, end, x.lse[places[r]]);
            gather<T, ND>(x.out + places[r] * D, 1, 1, 1.0f, result);
            const float mean = dot<ND>(up + r * D, result);
            for (int64_t j = 0; j < end; j += W) store(slope + j, (load(slope + j) - mean) * load(row + j));
        }
        weighted_rows<ND, R>(slopes.data(), stride, keys.data(), most, dqueries);
        add_rows<ND, R>(slopes.data(), stride, queries, most, dkeys.data());
        add_rows<ND, R>(scores.data(), stride, up, most, dvalues.data());
        for (int r = 0; r < R; ++r) scatter<T, ND>(dqueries + r * D, 1, 1, s.scale, x.dq + places[r] * D);
    }
};

template <typename T, int ND>
void stream_rows(const Tensors<T>& x, const Stream& s) {
    const Paths paths(s);
    const int64_t tasks = (paths.trees.size() - 1) * s.groups, D = ND * W;
    Parts parts(s, tasks, D, x.dout != nullptr);
#pragma omp parallel
    {
        TreeAttention<T, ND> attention(s, paths, x, parts);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks * parts.count; ++task) {
            const int64_t part = task % parts.count, group = task / parts.count % s.groups;
            const int64_t tree = task / parts.count / s.groups;
            attention.run(paths.trees[tree], paths.trees[tree + 1], group, part);
        }
        if (!parts.dk.empty()) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < parts.rows; ++row)
                for (int64_t d = row * D; d < (row + 1) * D; d += W) {
                    vf dk = {}, dv = {};
                    for (int64_t part = 0; part < parts.count; ++part) {
                        dk += load(&parts.dk[part * parts.rows * D + d]);
                        dv += load(&parts.dv[part * parts.rows * D + d]);
                    }
                    store(x.dk + d, dk);
                    store(x.dv + d, dv);
                }
        }
    }
}

template <typename T>
int stream(void* const* x, float* lse, int64_t head_dim, const Stream& s) {
    const Tensors<T> tensors{(const T*)x[0], (const T*)x[1], (const T*)x[2], (T*)x[3], lse,
                             (const T*)x[4], (T*)x[5], (T*)x[6], (T*)x[7]};
#define CASE(ND)                                                                                                  \
    case ND:                                                                                                      \
        stream_rows<T, ND>(tensors, s);                                                                           \
        return 0;
    switch (head_dim / W) {
        SIZES
    }
#undef CASE
    return 1;
}

}  // namespace
