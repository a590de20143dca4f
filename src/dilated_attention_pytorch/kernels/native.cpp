// Attention over a plan's tiles on a CPU: forward, and the gradients in one pass over the same rows.
//
// Every matrix is kept transposed, keys down and queries across, so that a vector register holds one value for
// each of several queries. All six products then have the form
//
//     C[i][lanes] += sum_k A[i, k] * B[k][lanes]
//
// where B is a small tile that stays in cache and A is read one scalar at a time. A may therefore have any strides:
// keys and values are used where they lie, whatever their layout or dilation, and nothing is packed. It also makes
// the softmax run down the columns, with no sum across a register.
//
// The first level of scores is in units of log 2: the query tile carries scale * log2(e).

#include "native_lanes.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

// These structures are filled in by native.py, field by field in the same order.
extern "C" {

struct Axis {
  Index rate, tiles;
  const std::int32_t* offset;
  const std::int64_t *start, *end;
};

struct Part {
  Axis queries, keys;
  const std::int32_t *head_class, *rows, *full, *partial, *mask, *order;
  Index row_count;
};

// A (batch, head, token, feature) array; strides count elements, features are adjacent.
struct Array {
  void* data;
  Index batch, head, token;
};

struct Call {
  Index batch, heads, key_heads, n, d, e, block, threads, splits, part_count, mask_words;
  double scale, keep_scale;
  Index seed, first_stream, drop_below;
  const Part* parts;
  const std::int32_t *mask_bits, *mask_band;
  const std::uint8_t* padding;
  Array query, key, value, output, lse, grad_output, grad_lse, grad_query;
  const Array *grad_key, *grad_value;  // one of each for every split
};

}  // extern "C"

namespace {

constexpr Index kPackedKeys = 4096;
constexpr Index kForwardKeys = 128, kBackwardKeys = 128;  // keys handled between two rescalings; scores fit in L2

inline std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// A key tile as one query tile meets it.
template <typename T>
struct Tile {
  Index first, count;  // first token, elements that exist
  Index at;            // row of the score buffer
  int mask;            // -1 when every pair is allowed
  bool padded;         // some key takes no part
  const T *key, *value;
  Index key_pitch, value_pitch;

  bool guarded() const { return mask >= 0 || padded; }
};

// Which key tile a dense copy holds.
template <typename T>
struct Slot {
  const T* key;
  Index pitch, count, chunk;
};

// What one thread needs for one query tile. Transposed arrays have `ld` lanes a row: odd in cache lines, because
// strips of a power-of-two pitch would fight for the same cache sets.
template <typename T>
struct Workspace {
  const Call& call;
  const Index ld, d_width, e_width, keys;
  std::vector<void*> owned;
  T *query_t, *grad_output_t, *result_t, *scores, *grad_scores, *query_rows, *grad_rows, *clean, *packed_keys, *packed_values;
  T *top, *total, *share, *delta;
  std::uint32_t* stream;
  bool packing;
  Index chunk = 0;
  std::vector<Slot<T>> slots;
  std::vector<Tile<T>> tiles;
  Tile<T> next;  // what the chunk after this one begins with
  std::vector<Run<T>> runs;
  std::vector<Index> bad, bad_queries, bad_grads;

  Workspace(const Call& c, bool backward)
      : call(c),
        ld(round_up(c.block, Lanes<T>::count) + Lanes<T>::count),
        d_width(round_up(c.d, Lanes<T>::count) + Lanes<T>::count),
        e_width(round_up(c.e, Lanes<T>::count) + Lanes<T>::count),
        keys(std::max(c.block, backward ? kBackwardKeys : kForwardKeys)) {
    query_t = array<T>(c.d * ld);
    result_t = array<T>((backward ? c.d : c.e) * ld);
    scores = array<T>(keys * ld);
    packing = c.key.token != c.d || c.value.token != c.e;
    for (Index p = 0; p < c.part_count; ++p) packing |= c.parts[p].keys.rate > 1;
    if (packing) {
      slots.resize(std::max<Index>(1, kPackedKeys / c.block));
      packed_keys = array<T>(slots.size() * c.block * d_width);
      packed_values = array<T>(slots.size() * c.block * e_width);
    }
    clean = array<T>(keys * std::max(d_width, e_width));
    for (T** row : {&top, &total, &share, &delta}) *row = array<T>(ld);
    stream = array<std::uint32_t>(ld);
    if (!backward) return;
    grad_output_t = array<T>(c.e * ld);
    grad_scores = array<T>(keys * ld);
    query_rows = array<T>(c.block * d_width);
    grad_rows = array<T>(c.block * e_width);
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() {
    for (void* p : owned) std::free(p);
  }

  template <typename U>
  U* array(Index size) {
    void* p = std::aligned_alloc(64, round_up(size * sizeof(U), 64));
    owned.push_back(p);
    return static_cast<U*>(p);
  }
};

// Sets to -inf what the bits forbid. A register takes one word of each of its queries and tests it bit by bit.
template <typename T>
void mask_by_bits(const std::int32_t* bits, Index words, Index queries, Index keys, T* scores, Index ld) {
  using Integer = typename Lanes<T>::Integer;
  constexpr Index w = Lanes<T>::count;
  for (Index i = 0; i < queries; i += w)
    for (Index word = 0; word * 32 < keys; ++word) {
      Integer taken = {};
      for (Index lane = 0; lane < w && i + lane < queries; ++lane) taken[lane] = bits[(i + lane) * words + word];
      for (Index j = word * 32; j < std::min(keys, word * 32 + 32); ++j) {
        T* to = scores + j * ld + i;
        const Vector<T> forbidden = Vector<T>{} - kInfinity<T>;
        store(to, (taken & ((Integer{} + 1) << (j - word * 32))) != 0 ? load(to) : forbidden);
      }
    }
}

// One query tile of one head of one batch entry.
struct QueryTile {
  const Part& part;
  Index batch, head, group, row;
  Index first, count, lanes;
};

template <typename T>
T* at(const Array& x, Index batch, Index head, Index token) {
  return static_cast<T*>(x.data) + batch * x.batch + head * x.head + token * x.token;
}

template <typename T>
T* query_row(const Array& x, const QueryTile& q, Index i) {
  return at<T>(x, q.batch, q.head, q.first + q.part.queries.rate * i);
}

Index existing(const Axis& axis, Index tile, Index first, Index block) {
  const Index room = axis.end[tile] - first;
  return room <= 0 ? 0 : std::min(block, (room + axis.rate - 1) / axis.rate);
}

template <typename T>
QueryTile query_tile(const Call& call, const Part& part, Index batch, Index head, Index row) {
  const Index tile = row % part.queries.tiles, first = part.queries.start[tile] + part.queries.offset[head];
  const Index count = existing(part.queries, tile, first, call.block);
  return {part, batch, head, head / (call.heads / call.key_heads), row, first, count, round_up(count, Lanes<T>::count)};
}

template <typename T>
Tile<T> key_tile(const Call& call, const QueryTile& q, Index tile, int mask) {
  const Axis& axis = q.part.keys;
  Tile<T> t{};
  t.first = axis.start[tile] + axis.offset[q.head];
  t.count = mask < 0 ? call.block : existing(axis, tile, t.first, call.block);
  t.mask = mask;
  if (call.padding) {
    Index out = 0;
    for (Index j = 0; j < t.count; ++j) out += call.padding[q.batch * call.n + t.first + axis.rate * j] != 0;
    t.padded = out > 0;
    if (out == t.count) t.count = 0;
  }
  t.key = at<T>(call.key, q.batch, q.group, t.first);
  t.value = at<T>(call.value, q.batch, q.group, t.first);
  t.key_pitch = call.key.token * axis.rate;
  t.value_pitch = call.value.token * axis.rate;
  return t;
}

template <typename T>
void copy_rows(const T*& from, Index& pitch, Index count, Index width, T* to, Index ld) {
  for (Index j = 0; j < count; ++j) std::copy_n(from + j * pitch, width, to + j * ld);
  from = to;
  pitch = ld;
}

// Points a tile whose rows lie far apart at a dense copy. Rows at a power-of-two distance fall into a few cache sets and
// push each other out; neighbouring query tiles mostly meet the same keys, so that a copy serves many of them.
template <typename T>
void pack(Workspace<T>& w, Index index, Tile<T>& tile) {
  if (tile.key_pitch == w.call.d && tile.value_pitch == w.call.e) return;
  Slot<T>& slot = w.slots[index % w.slots.size()];
  if (slot.chunk == w.chunk) return;  // in use by another tile of this chunk
  slot.chunk = w.chunk;
  const bool there = slot.key == tile.key && slot.pitch == tile.key_pitch && slot.count >= tile.count;
  T* keys = w.packed_keys + (index % w.slots.size()) * w.call.block * w.d_width;
  T* values = w.packed_values + (index % w.slots.size()) * w.call.block * w.e_width;
  const Index count = there ? 0 : tile.count;
  if (!there) slot.key = tile.key, slot.pitch = tile.key_pitch, slot.count = tile.count;
  copy_rows(tile.key, tile.key_pitch, count, w.call.d, keys, w.d_width);
  copy_rows(tile.value, tile.value_pitch, count, w.call.e, values, w.e_width);
}

// Gathers the key tiles of a row into w.tiles and calls f() each time the score buffer is full, and at the end.
template <typename T, typename F>
void for_chunks(Workspace<T>& w, const QueryTile& q, F&& f) {
  const std::int32_t* row = q.part.rows + q.row * 6;
  Index keys = 0;
  w.tiles.clear();
  ++w.chunk;
  const auto take = [&](Index index, int mask) {
    Tile<T> tile = key_tile<T>(w.call, q, index, mask);
    if (!tile.count) return;
    if (keys + tile.count > w.keys) {
      w.next = tile;
      f(keys);
      w.tiles.clear();
      keys = 0;
      ++w.chunk;
    }
    tile.at = keys;
    keys += tile.count;
    if (w.packing) pack(w, index, tile);
    w.tiles.push_back(tile);
  };
  for (Index j = row[0]; j < row[1]; ++j) take(row[2] + q.part.full[j], -1);
  for (Index j = row[3]; j < row[4]; ++j) take(row[5] + q.part.partial[j], q.part.mask[j]);
  w.next.count = 0;
  if (keys) f(keys);
}

template <typename T>
void mask_scores(const Call& call, const QueryTile& q, const Tile<T>& tile, T* scores, Index ld) {
  if (tile.mask >= 0) {
    const std::int32_t* band = call.mask_band + 2 * tile.mask;
    if (band[0] <= band[1]) {
      for (Index j = 0; j < tile.count; ++j) {
        const Index from = std::clamp<Index>(j - band[1], 0, q.lanes), to = std::clamp<Index>(j - band[0] + 1, from, q.lanes);
        std::fill(scores + j * ld, scores + j * ld + from, -kInfinity<T>);
        std::fill(scores + j * ld + to, scores + j * ld + q.lanes, -kInfinity<T>);
      }
    } else {
      const std::int32_t* bits = call.mask_bits + tile.mask * call.block * call.mask_words;
      mask_by_bits(bits, call.mask_words, q.count, tile.count, scores, ld);
    }
  }
  if (!tile.padded) return;
  const std::uint8_t* padding = call.padding + q.batch * call.n + tile.first;
  for (Index j = 0; j < tile.count; ++j)
    if (padding[q.part.keys.rate * j]) std::fill(scores + j * ld, scores + j * ld + q.lanes, -kInfinity<T>);
}

// Scores of all keys of the chunk, -inf where a pair is not allowed.
template <typename T>
void score(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  for (const Tile<T>& tile : w.tiles) {
    T* scores = w.scores + tile.at * w.ld;
    const Run<T> run{tile.key, call.d, 1};
    product(&run, 1, tile.count, tile.key_pitch, w.query_t, w.ld, q.lanes, scores, w.ld, false);
    if (tile.guarded()) mask_scores(call, q, tile, scores, w.ld);
  }
}

// result_t[x][lane] (+)= sum over keys of source[key][x] * weights[key][lane], where source is the keys or the values.
// A weight that a mask made 0 must not meet a NaN: rows of guarded tiles that hold one are taken out of the product and
// added only where the weight is not 0.
template <typename T>
void accumulate(Workspace<T>& w, const QueryTile& q, const T* Tile<T>::*source, Index Tile<T>::*pitch, Index width,
                const T* weights, bool add) {
  w.runs.clear();
  w.bad.clear();
  for (const Tile<T>& tile : w.tiles) {
    const T* from = tile.*source;
    const Index step = tile.*pitch;
    Index bad = 0;
    for (Index j = 0; tile.guarded() && j < tile.count; ++j)
      if (!all_finite(from + j * step, width)) w.bad.push_back(tile.at + j), ++bad;
    w.runs.push_back({from, tile.count, step});
    if (!bad) continue;
    T* clean = w.clean + tile.at * width;
    for (Index j = 0; j < tile.count; ++j) std::copy_n(from + j * step, width, clean + j * width);
    w.runs.back() = {clean, tile.count, width};
  }
  std::vector<T> rows;
  for (Index key : w.bad) {
    T* row = w.clean + key * width;
    rows.insert(rows.end(), row, row + width);
    std::fill_n(row, width, T(0));
  }
  product(w.runs.data(), w.runs.size(), width, 1, weights, w.ld, q.lanes, w.result_t, w.ld, add);
  for (std::size_t i = 0; i < w.bad.size(); ++i)
    for (Index x = 0; x < width; ++x)
      for (Index lane = 0; lane < q.lanes; ++lane) {
        const T weight = weights[w.bad[i] * w.ld + lane];
        if (weight != 0) w.result_t[x * w.ld + lane] += weight * rows[i * width + x];
      }
}

// Whether each weight of a tile survives dropout, as kernels/dropout.py defines it.
template <typename T>
void drop(const Call& call, const QueryTile& q, const Tile<T>& tile, const std::uint32_t* stream, T* weights, Index ld) {
  const T keep = T(call.keep_scale);
  const std::uint32_t below = std::uint32_t(call.drop_below);
  for (Index j = 0; j < tile.count; ++j) {
    const std::uint32_t key = std::uint32_t(tile.first + q.part.keys.rate * j) * 0x9E3779B9u;
    T* row = weights + j * ld;
    for (Index i = 0; i < q.lanes; ++i) row[i] = mix(stream[i] ^ key) >= below ? row[i] * keep : T(0);
  }
}

template <typename T>
void start_streams(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  const auto seed = std::uint64_t(call.seed);
  const std::uint32_t batch_head = std::uint32_t(call.first_stream + q.batch * call.heads + q.head);
  const std::uint32_t stream = mix(std::uint32_t(seed) ^ mix(std::uint32_t(seed >> 32) + batch_head));
  for (Index i = 0; i < q.lanes; ++i) w.stream[i] = mix(stream + std::uint32_t(q.first + q.part.queries.rate * i));
}

// Calls for key j of the tile that comes next, so that it arrives while this one is computed.
template <typename T>
inline void fetch_ahead(const Workspace<T>& w, Index j) {
  constexpr Index line = 64 / sizeof(T);
  if (j >= w.next.count) return;
  for (Index x = 0; x < w.call.d; x += line) __builtin_prefetch(w.next.key + j * w.next.key_pitch + x, 0, 2);
  for (Index x = 0; x < w.call.e; x += line) __builtin_prefetch(w.next.value + j * w.next.value_pitch + x, 0, 2);
}

// Turns scores into weights relative to the new maximum, and brings what was summed so far to the same footing.
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
      // A row that has seen no key keeps -inf as its maximum, and -inf - -inf would be NaN.
      base[p] = top[p] == -kInfinity<T> ? zero : top[p];
      share[p] = exp2<T>(load(w.top + x + p * n) - base[p]);
      store(w.top + x + p * n, top[p]);
    }
    for (Index j = 0; j < keys; ++j) {
      if (x == 0) fetch_ahead(w, j);
      for (int p = 0; p < P; ++p) {
        T* score = w.scores + j * w.ld + x + p * n;
        const Vector<T> weight = exp2<T>(load(score) - base[p]);
        store(score, weight);
        sum[p] += weight;
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

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// The running softmax of these rows as earlier parts left it. Says whether any of them has seen a key.
template <typename T>
bool resume(Workspace<T>& w, const QueryTile& q) {
  bool seen = false;
  for (Index i = 0; i < q.lanes; ++i) {
    const T lse = i < q.count ? *query_row<T>(w.call.lse, q, i) : -kInfinity<T>;
    w.top[i] = lse * T(kLog2E);
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
    *query_row<T>(w.call.lse, q, i) = total == 0 ? -kInfinity<T> : (w.top[i] + std::log2(total)) * T(kLn2);
  }
  const auto row = [&](Index i) { return query_row<T>(w.call.output, q, i); };
  transpose_out(w.result_t, w.ld, q.count, w.call.e, row, w.share, false);
}

template <typename T>
void forward_tile(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  const auto row = [&](Index i) { return query_row<T>(call.query, q, i); };
  transpose_in<T>(row, q.count, call.d, T(call.scale * kLog2E), w.query_t, w.ld);
  if (call.drop_below) start_streams(w, q);
  bool seen = resume(w, q), any = false;
  for_chunks(w, q, [&](Index keys) {
    score(w, q);
    soften(w, q, keys, seen);
    if (call.drop_below)
      for (const Tile<T>& tile : w.tiles) drop(call, q, tile, w.stream, w.scores + tile.at * w.ld, w.ld);
    accumulate(w, q, &Tile<T>::value, &Tile<T>::value_pitch, call.e, w.scores, seen);
    seen = any = true;
  });
  if (any) finish(w, q);
}

// Copies rows times `factor`. Rows that are not finite become 0 and are noted, for `scatter` to add by hand.
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

// grad_scores and weights from the scores in place: w.scores becomes the weights that multiplied the values.
template <typename T>
void differentiate(Workspace<T>& w, const QueryTile& q, const Tile<T>& tile) {
  constexpr Index n = Lanes<T>::count;
  const Vector<T> zero = {};
  for_strips<T>(q.lanes, [&](auto vectors, Index x) {
    constexpr int P = decltype(vectors)::value;
    Vector<T> lse[P], delta[P];
    for (int p = 0; p < P; ++p) lse[p] = load(w.top + x + p * n), delta[p] = load(w.delta + x + p * n);
    for (Index j = tile.at; j < tile.at + tile.count; ++j) {
      if (x == 0) fetch_ahead(w, j);
      for (int p = 0; p < P; ++p) {
        T *score = w.scores + j * w.ld + x + p * n, *grad = w.grad_scores + j * w.ld + x + p * n;
        const Vector<T> s = load(score), weight = exp2<T>(s - lse[p]);
        // A pair that is not allowed must stay 0 even where the row's LSE or the value is NaN.
        store(score, s == -kInfinity<T> ? zero : weight);
        store(grad, s == -kInfinity<T> ? zero : weight * (load(grad) - delta[p]));
      }
    }
  });
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

// LSE in units of log 2, and delta = <grad_output, output> - grad_lse, for each query of the tile.
template <typename T>
void load_statistics(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  for (Index i = 0; i < q.lanes; ++i) {
    const T lse = i < q.count ? *query_row<T>(call.lse, q, i) : -kInfinity<T>;
    // +inf gives weight 0 whatever the score: for rows without a key, and for lanes past the last query.
    w.top[i] = lse == -kInfinity<T> ? kInfinity<T> : lse * T(kLog2E);
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
  transpose_in<T>(query, q.count, call.d, T(call.scale * kLog2E), w.query_t, w.ld);
  transpose_in<T>(grad, q.count, call.e, T(1), w.grad_output_t, w.ld);
  rows_in<T>(q, call.query, call.d, scale, w.query_rows, w.d_width, w.bad_queries);
  rows_in<T>(q, call.grad_output, call.e, T(1), w.grad_rows, w.e_width, w.bad_grads);
  load_statistics(w, q);
  if (call.drop_below) start_streams(w, q);
  bool any = false;
  for_chunks(w, q, [&](Index) {
    score(w, q);
    for (const Tile<T>& tile : w.tiles) {
      T *scores = w.scores + tile.at * w.ld, *grads = w.grad_scores + tile.at * w.ld;
      const Run<T> run{tile.value, call.e, 1};
      product(&run, 1, tile.count, tile.value_pitch, w.grad_output_t, w.ld, q.lanes, grads, w.ld, false);
      if (call.drop_below) drop(call, q, tile, w.stream, grads, w.ld);
      differentiate(w, q, tile);
      if (call.drop_below) drop(call, q, tile, w.stream, scores, w.ld);
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

// The rows of each head that meet a key, in the plan's order: head h owns items first[h] .. first[h + 1] - 1.
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
    if (kind >= 0 && kind < Index(by_class.size())) s.rows.insert(s.rows.end(), by_class[kind].begin(), by_class[kind].end());
  }
  s.first.push_back(s.rows.size());
  return s;
}

std::vector<Schedule> schedules(const Call& call) {
  std::vector<Schedule> all;
  for (Index p = 0; p < call.part_count; ++p) all.push_back(schedule(call, call.parts[p]));
  return all;
}

// Parts run one after another: each continues the softmax of the rows that earlier ones left.
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

// A task owns the dK and dV of one key head, or one of `splits` copies of them, so that sums have a fixed order.
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

extern "C" {
void forward_float(const Call* call) { forward<float>(*call); }
void forward_double(const Call* call) { forward<double>(*call); }
void backward_float(const Call* call) { backward<float>(*call); }
void backward_double(const Call* call) { backward<double>(*call); }
Index call_bytes() { return sizeof(Call); }
}
