// Attention over a plan's tiles on a CPU: the forward pass, and all gradients in one pass over the same rows.
//
// Every matrix is stored transposed, with keys as rows and queries as columns, so that a vector register holds values
// of consecutive queries. All six products then have the form
//
//     C[i][lanes] += sum_k A[i, k] * B[k][lanes]
//
// where B is a small tile that stays in cache, and A is read by scalars and may have any strides: keys and values are
// read in place, or from dense copies where their rows are distant (see `pack`). The softmax runs along the rows of a
// column, without sums across the lanes of a register.
//
// Scores and LSE are natural logarithms throughout: the backward pass subtracts the LSE of the forward pass from the
// same scores. A change of base would round the LSE again, by 2^-24 of its magnitude.

#include "native_choose.h"
#include "native_match.h"
#include "native_tiles.h"

#include <algorithm>
#include <cmath>
#include <vector>

#ifdef DAP_STANDALONE
// Library of a wheel: links no C++ runtime, takes OpenMP from the process, and needs symbols of an old glibc alone.
void* operator new(std::size_t size) {
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  std::abort();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
namespace std {
void __throw_length_error(const char*) { std::abort(); }
void __throw_bad_alloc() { std::abort(); }
void __throw_bad_array_new_length() { std::abort(); }
}  // namespace std
#ifdef __x86_64__
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver logf,logf@GLIBC_2.2.5");
#else
__asm__(".symver log,log@GLIBC_2.17");
__asm__(".symver logf,logf@GLIBC_2.17");
#endif
#endif

namespace {

// Token of a row, for dropout.
inline std::uint32_t position(const std::int64_t* positions, const QueryTile& q, Index row, Index n) {
  return std::uint32_t(positions ? positions[q.head * n + row] : row);
}

// Applies the dropout mask of kernels/dropout.py to the weights of a tile, or to their gradients.
template <typename T>
void drop(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile, T* buffer) {
  const Call& call = w.call;
  const T keep = T(call.keep_scale);
  const std::uint32_t below = std::uint32_t(call.drop_below);
  for (Index j = 0; j < tile.count; ++j) {
    const std::uint32_t key = position(call.key_positions, q, tile.first + q.part.keys.rate * j, call.n) * 0x9E3779B9u;
    T* row = buffer + (tile.at + j) * w.ld;
    for (Index i = 0; i < q.lanes; ++i) row[i] = mix(w.stream[i] ^ key) >= below ? row[i] * keep : T(0);
  }
}

template <typename T>
void start_streams(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  const auto seed = std::uint64_t(call.seed);
  const std::uint32_t batch_head = std::uint32_t(call.first_stream + q.batch * call.heads + q.head);
  const std::uint32_t stream = mix(std::uint32_t(seed) ^ mix(std::uint32_t(seed >> 32) + batch_head));
  // Lanes past the last query repeat it; their values are never stored.
  for (Index i = 0; i < q.lanes; ++i) {
    const Index row = q.first + q.part.queries.rate * std::min(i, q.count - 1);
    w.stream[i] = mix(stream + position(call.query_positions, q, row, call.n));
  }
}

// Replaces scores by weights relative to the new maximum, and rescales the running sums to that maximum.
template <typename T>
void soften(Workspace<T>& w, const QueryTile& q, Index keys, bool rescale) {
  constexpr Index n = Lanes<T>::count;
  for_strips<T>(q.lanes, [&](auto vectors, Index x) {
    constexpr int P = decltype(vectors)::value;
    Vector<T> top[P], base[P], share[P], sum[P] = {};
    for (int p = 0; p < P; ++p) top[p] = load(w.top + x + p * n);
    for (Index j = 0; j < keys; ++j)
      for (int p = 0; p < P; ++p) top[p] = maximum<T>(top[p], load(w.scores + j * w.ld + x + p * n));
    for (int p = 0; p < P; ++p) {
      const Vector<T> zero = {};
      // The maximum of a row without a key is -inf, and -inf - -inf is NaN.
      base[p] = top[p] == -kInfinity<T> ? zero : top[p];
      share[p] = exponential<T>(load(w.top + x + p * n) - base[p]);
      store(w.top + x + p * n, top[p]);
    }
    for (const Tile<T>& tile : w.tiles) {
      const T* value = x == 0 ? tile.value : nullptr;
      const Index pitch = tile.value_pitch, width = w.call.e, ld = w.ld;
      T* row = w.scores + tile.at * ld + x;
      for (Index j = tile.count; j > 0; --j, row += ld) {
        // Prefetch the values, which the next product reads column by column; hardware prefetchers miss that order.
        if (value) fetch(value, width), value += pitch;
        for (int p = 0; p < P; ++p) {
          const Vector<T> weight = exponential<T>(load(row + p * n) - base[p]);
          store(row + p * n, weight);
          sum[p] += weight;
        }
      }
    }
    for (int p = 0; p < P; ++p) store(w.total + x + p * n, load(w.total + x + p * n) * share[p] + sum[p]);
    for (Index row = 0; rescale && row < w.call.e; ++row)
      for (int p = 0; p < P; ++p) {
        T* to = w.result_t + row * w.ld + x + p * n;
        store(to, load(to) * share[p]);
      }
  });
}

// Loads the running softmax of the rows after earlier parts. Returns whether some row has a key already.
template <typename T>
bool resume(Workspace<T>& w, const QueryTile& q) {
  bool seen = false;
  for (Index i = 0; i < q.lanes; ++i) {
    const T lse = i < q.count ? *query_row<T>(w.call.lse, q, i) : -kInfinity<T>;
    w.top[i] = lse;
    w.total[i] = lse == -kInfinity<T> ? 0 : 1;
    seen |= lse != -kInfinity<T>;
  }
  const auto row = [&](Index i) { return query_row<T>(w.call.output, q, i); };
  if (seen) transpose_in<T>(row, q.count, w.call.e, T(1), w.result_t, w.ld);
  return seen;
}

template <typename T>
void finish(Workspace<T>& w, const QueryTile& q) {
  for (Index i = 0; i < q.count; ++i) {
    const T total = w.total[i];
    w.share[i] = total == 0 ? T(0) : 1 / total;
    *query_row<T>(w.call.lse, q, i) = total == 0 ? -kInfinity<T> : w.top[i] + std::log(total);
  }
  const auto row = [&](Index i) { return query_row<T>(w.call.output, q, i); };
  transpose_out(w.result_t, w.ld, q.count, w.call.e, row, w.share, false);
}

template <typename T>
void forward_tile(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  const auto row = [&](Index i) { return query_row<T>(call.query, q, i); };
  transpose_in<T>(row, q.count, call.d, T(1), w.query_t, w.ld);
  if (call.drop_below) start_streams(w, q);
  if (call.bias.table) load_bias_positions(w, q);
  bool seen = resume(w, q), any = false;
  for_chunks(w, q, [&](Index keys) {
    score(w, q);
    soften(w, q, keys, seen);
    if (call.drop_below)
      for (const Tile<T>& tile : w.tiles) drop(w, q, tile, w.scores);
    accumulate(w, q, &Tile<T>::value, &Tile<T>::value_pitch, call.e, w.scores, seen);
    seen = any = true;
  });
  if (any) finish(w, q);
}

// Copies rows times `factor`. Rows with a value that is not finite become 0 and are listed in `bad` for `scatter`.
template <typename T>
void rows_in(const QueryTile& q, const Array& from, Index width, T factor, T* to, Index ld, std::vector<Index>& bad) {
  bad.clear();
  for (Index i = 0; i < q.count; ++i) {
    const T* row = query_row<T>(from, q, i);
    const bool finite = all_finite(row, width);
    if (!finite) bad.push_back(i);
    T* copy = to + i * ld;
    std::fill_n(copy + (finite ? width : 0), ld - (finite ? width : 0), T(0));
    for (Index x = 0; finite && x < width; ++x) copy[x] = row[x] * factor;
  }
}

// Replaces scores by weights, and gradients of the weights by gradients of the scores.
template <typename T>
void differentiate(Workspace<T>& w, const QueryTile& q, const Tile<T>& tile) {
  constexpr Index n = Lanes<T>::count;
  const Vector<T> zero = {};
  for_strips<T>(q.lanes, [&](auto vectors, Index x) {
    constexpr int P = decltype(vectors)::value;
    Vector<T> lse[P], delta[P];
    for (int p = 0; p < P; ++p) lse[p] = load(w.top + x + p * n), delta[p] = load(w.delta + x + p * n);
    const Index ld = w.ld;
    T *score = w.scores + tile.at * ld + x, *grad = w.grad_scores + tile.at * ld + x;
    for (Index j = tile.count; j > 0; --j, score += ld, grad += ld)
      for (int p = 0; p < P; ++p) {
        const Vector<T> s = load(score + p * n), weight = exponential<T>(s - lse[p]);
        // Masked pairs are 0 even if the LSE of the row or the value is NaN.
        store(score + p * n, s == -kInfinity<T> ? zero : weight);
        store(grad + p * n, s == -kInfinity<T> ? zero : weight * (load(grad + p * n) - delta[p]));
      }
  });
}

// Adds the gradients of a tile's scores to those of the bias table.
template <typename T>
void add_bias_gradient(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile, Index split) {
  const Call& call = w.call;
  double* to = call.bias.grad + ((split * call.batch + q.batch) * call.heads + q.head) * call.bias.entries();
  const auto run = [&](Index row, Index entry) {
    const T* grads = w.grad_scores + row * w.ld;
    for (Index i = 0; i < q.count; ++i) to[entry + i] += double(grads[i]);
  };
  const auto gather = [&](Index row, const Index* entries) {
    const T* grads = w.grad_scores + row * w.ld;
    for (Index i = 0; i < q.count; ++i) to[entries[i]] += double(grads[i]);
  };
  for_bias_entries(w, q, tile, run, gather);
}

// Multiplies the gradients of capped scores by the derivative of the cap. Masked pairs stay 0 where it is NaN.
template <typename T>
void apply_slopes(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile) {
  const Vector<T> zero = {};
  for (Index j = tile.at; j < tile.at + tile.count; ++j)
    for (Index i = 0; i < q.lanes; i += Lanes<T>::count) {
      T* grad = w.grad_scores + j * w.ld + i;
      const Vector<T> g = load(grad);
      store(grad, g == T(0) ? zero : g * load(w.slopes + j * w.ld + i));
    }
}

// to[key][x] += sum over queries of weights[key][query] * rows[query][x]
template <typename T>
void scatter(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile, const T* weights, const T* rows, Index ld,
             Index width, const Array& target, const Array& source, T factor, const std::vector<Index>& bad) {
  T* to = at<T>(target, q.batch, q.group, tile.first);
  const Index ldc = target.token * q.part.keys.rate;
  weights += tile.at * w.ld;
  const Run<T> run{weights, q.count, 1};
  product(&run, 1, tile.count, w.ld, rows, ld, round_up(width, Lanes<T>::count), to, ldc, true);
  for (Index i : bad)
    for (Index j = 0; j < tile.count; ++j) {
      const T weight = weights[j * w.ld + i] * factor, *row = query_row<T>(source, q, i);
      for (Index x = 0; weight != 0 && x < width; ++x) to[j * ldc + x] += weight * row[x];
    }
}

// LSE and delta = <grad_output, output> - grad_lse, for each query of the tile.
template <typename T>
void load_statistics(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  for (Index i = 0; i < q.lanes; ++i) {
    const T lse = i < q.count ? *query_row<T>(call.lse, q, i) : -kInfinity<T>;
    // An LSE of +inf gives weight 0 for every score: in rows without a key, and in lanes past the last query.
    w.top[i] = lse == -kInfinity<T> ? kInfinity<T> : lse;
    w.delta[i] = 0;
    if (i >= q.count) continue;
    const T *output = query_row<T>(call.output, q, i), *grad = query_row<T>(call.grad_output, q, i);
    w.delta[i] = dot(output, grad, call.e) - (call.grad_lse.data ? *query_row<T>(call.grad_lse, q, i) : T(0));
  }
}

template <typename T>
void backward_tile(Workspace<T>& w, const QueryTile& q, Index split) {
  const Call& call = w.call;
  const T scale = T(call.scale);
  const Array &grad_key = call.grad_key[split], &grad_value = call.grad_value[split];
  const auto query = [&](Index i) { return query_row<T>(call.query, q, i); };
  const auto grad = [&](Index i) { return query_row<T>(call.grad_output, q, i); };
  transpose_in<T>(query, q.count, call.d, T(1), w.query_t, w.ld);
  transpose_in<T>(grad, q.count, call.e, T(1), w.grad_output_t, w.ld);
  rows_in<T>(q, call.query, call.d, scale, w.query_rows, w.d_width, w.bad_queries);
  rows_in<T>(q, call.grad_output, call.e, T(1), w.grad_rows, w.e_width, w.bad_grads);
  load_statistics(w, q);
  if (call.drop_below) start_streams(w, q);
  if (call.bias.table) load_bias_positions(w, q);
  bool any = false;
  for_chunks(w, q, [&](Index) {
    score(w, q);
    for (const Tile<T>& tile : w.tiles) {
      T* grads = w.grad_scores + tile.at * w.ld;
      const Run<T> run{tile.value, call.e, 1};
      product(&run, 1, tile.count, tile.value_pitch, w.grad_output_t, w.ld, q.lanes, grads, w.ld, false);
      if (call.drop_below) drop(w, q, tile, w.grad_scores);
      differentiate(w, q, tile);
      if (call.bias.table) add_bias_gradient(w, q, tile, split);
      if (call.softcap) apply_slopes(w, q, tile);
      if (call.drop_below) drop(w, q, tile, w.scores);
      scatter(w, q, tile, w.scores, w.grad_rows, w.e_width, call.e, grad_value, call.grad_output, T(1), w.bad_grads);
      scatter(w, q, tile, w.grad_scores, w.query_rows, w.d_width, call.d, grad_key, call.query, scale, w.bad_queries);
    }
    accumulate(w, q, &Tile<T>::key, &Tile<T>::key_pitch, call.d, w.grad_scores, any);
    any = true;
  });
  if (!any) return;
  std::fill_n(w.share, q.count, scale);
  const auto grad_query = [&](Index i) { return query_row<T>(call.grad_query, q, i); };
  transpose_out(w.result_t, w.ld, q.count, call.d, grad_query, w.share, true);
}

// Work items: the rows of each head with at least one key tile, in the order of the plan. Head h has the items
// first[h] .. first[h + 1] - 1.
struct Schedule {
  std::vector<Index> first, rows;
};

Schedule schedule(const Call& call, const Part& part) {
  std::vector<std::vector<Index>> by_class;
  for (Index i = 0; i < part.row_count; ++i) {
    const Index row = part.order[i], kind = row / part.queries.tiles;
    const std::int32_t* list = part.rows + row * 6;
    if (kind >= Index(by_class.size())) by_class.resize(kind + 1);
    if (list[0] < list[1] || list[3] < list[4]) by_class[kind].push_back(row);
  }
  Schedule s;
  for (Index head = 0; head < call.heads; ++head) {
    s.first.push_back(s.rows.size());
    const Index kind = part.head_class[head];
    if (kind < 0 || kind >= Index(by_class.size())) continue;
    s.rows.insert(s.rows.end(), by_class[kind].begin(), by_class[kind].end());
  }
  s.first.push_back(s.rows.size());
  return s;
}

std::vector<Schedule> schedules(const Call& call) {
  std::vector<Schedule> all;
  for (Index p = 0; p < call.part_count; ++p) all.push_back(schedule(call, call.parts[p]));
  return all;
}

// Parts run one after another; each resumes the softmax of the earlier parts.
template <typename T>
void forward(const Call& call) {
  const std::vector<Schedule> all = schedules(call);
#pragma omp parallel num_threads(int(call.threads))
  {
    Workspace<T> w(call, false);
    for (Index p = 0; p < call.part_count; ++p) {
      const Schedule& s = all[p];
      const Index items = s.rows.size();
#pragma omp for schedule(dynamic)
      for (Index i = 0; i < call.batch * items; ++i) {
        const Index item = i % items;
        const Index head = std::upper_bound(s.first.begin(), s.first.end(), item) - s.first.begin() - 1;
        const QueryTile q = query_tile<T>(call, call.parts[p], i / items, head, s.rows[item]);
        if (q.count) forward_tile(w, q);
      }
    }
  }
}

// A task owns the dK and dV of one key head and the bias gradient of its query heads, or one of `splits` copies of
// them, so that sums have a fixed order.
template <typename T>
void backward(const Call& call) {
  const std::vector<Schedule> all = schedules(call);
  const Index shared = call.heads / call.key_heads;
#pragma omp parallel num_threads(int(call.threads))
  {
    Workspace<T> w(call, true);
    for (Index p = 0; p < call.part_count; ++p) {
      const Schedule& s = all[p];
#pragma omp for schedule(dynamic)
      for (Index task = 0; task < call.batch * call.key_heads * call.splits; ++task) {
        const Index split = task % call.splits, group = task / call.splits % call.key_heads;
        const Index batch = task / call.splits / call.key_heads;
        for (Index head = group * shared; head < (group + 1) * shared; ++head)
          for (Index item = s.first[head] + split; item < s.first[head + 1]; item += call.splits) {
            const QueryTile q = query_tile<T>(call, call.parts[p], batch, head, s.rows[item]);
            if (q.count) backward_tile(w, q, split);
          }
      }
    }
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
void forward_float(const Call* call) { forward<float>(*call); }
void forward_double(const Call* call) { forward<double>(*call); }
void backward_float(const Call* call) { backward<float>(*call); }
void backward_double(const Call* call) { backward<double>(*call); }
void best_match_float(const Match* match) { best_match<float>(*match); }
void best_match_double(const Match* match) { best_match<double>(*match); }
void choose_blocks(const Choice* choice) { choose_blocks_of_rows(*choice); }
Index call_bytes() { return sizeof(Call); }
}
#pragma GCC visibility pop
