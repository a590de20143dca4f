// Arguments of the kernel, workspace of a thread, and the scores of one query tile with its key tiles.

#pragma once

#include "native_lanes.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

// native.py declares the same structures with the same order of fields.
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

// Table of biases by distance, (heads, rows, width + 2 * pad) with rows = 1 for one axis: entry (x, pad + y) is the
// bias of pairs whose positions differ by (x - rows / 2, y - width / 2), query minus key. The padding repeats the
// outermost entries of the last axis, so that a whole register of lanes can be read at any clamped distance.
struct Bias {
  const void* table;  // null without a bias
  double* grad;       // (splits, batch, heads, rows, width + 2 * pad) sums of the backward pass
  Index axes, rows, width, pad;
  // (batch or 1, n, axes) for both, (heads, n, axes) for each, or null where row numbers are the positions
  const std::int64_t *query_positions, *key_positions;
  Index positions_batch, positions_head;  // elements from the positions of one sample or head to the next

  Index entries() const { return rows * (width + 2 * pad); }
};

struct Call {
  Index batch, heads, key_heads, n, d, e, block, threads, splits, part_count, mask_words;
  double scale, keep_scale, softcap;  // a softcap of 0 leaves scores unbounded
  Index seed, first_stream, drop_below;
  const Part* parts;
  const std::int32_t *mask_bits, *mask_band;
  const std::uint8_t* padding;
  const std::int64_t *query_positions, *key_positions;  // (heads, n): tokens of rows for dropout; null: row numbers
  Array query, key, value, output, lse, grad_output, grad_lse, grad_query;
  const Array *grad_key, *grad_value;  // one of each for every split
  Bias bias;
};

}  // extern "C"

namespace {

constexpr Index kChunkKeys = 128;    // keys of a chunk; a strip of their weights fits in the L1 cache
constexpr Index kPackedKeys = 4096;  // keys in the dense copies of a thread

inline std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// A key tile in the list of one query tile.
template <typename T>
struct Tile {
  Index first, count;  // first token, number of existing elements
  Index at;            // first row in the score buffer
  int mask;            // index of the mask; -1 if every pair is allowed
  bool padded;         // whether padding masks some of the keys
  const T *key, *value;
  Index key_pitch, value_pitch;

  bool guarded() const { return mask >= 0 || padded; }
};

// Cache key of a dense copy. It holds both addresses, because keys may share memory where values do not.
template <typename T>
struct Slot {
  const T *key, *value;
  Index rate, count, chunk;
};

// Buffers of one thread. Rows of transposed arrays are `ld` elements apart, an odd number of cache lines: a power of
// two would map all rows of a strip to the same cache sets.
template <typename T>
struct Workspace {
  const Call& call;
  const Index ld, d_width, e_width, keys;
  std::vector<void*> owned;
  T *query_t, *grad_output_t, *result_t, *scores, *grad_scores, *slopes;
  T *query_rows, *grad_rows, *clean, *packed_keys, *packed_values;
  T *top, *total, *share, *delta;
  std::uint32_t* stream;
  Index *bias_at, *entries;
  bool packing;
  Index chunk = 0;
  std::vector<Slot<T>> slots;
  std::vector<Tile<T>> tiles;
  std::vector<Run<T>> runs;
  std::vector<Index> bad, bad_queries, bad_grads;

  Workspace(const Call& c, bool for_backward)
      : call(c),
        ld(round_up(c.block, Lanes<T>::count) + Lanes<T>::count),
        d_width(round_up(c.d, Lanes<T>::count) + Lanes<T>::count),
        e_width(round_up(c.e, Lanes<T>::count) + Lanes<T>::count),
        keys(std::max(c.block, kChunkKeys)) {
    query_t = array<T>(c.d * ld);
    result_t = array<T>((for_backward ? c.d : c.e) * ld);
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
    bias_at = array<Index>(2 * ld);
    entries = array<Index>(ld);
    slopes = nullptr;
    if (!for_backward) return;
    grad_output_t = array<T>(c.e * ld);
    grad_scores = array<T>(keys * ld);
    slopes = c.softcap ? array<T>(keys * ld) : nullptr;
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

// Redirects a tile with distant rows to a dense copy. Rows at a power-of-two pitch map to few cache sets and evict each
// other. Neighbouring query tiles mostly list the same key tiles, so that they share a copy.
template <typename T>
void pack(Workspace<T>& w, Index index, Index rate, Tile<T>& tile) {
  if (tile.key_pitch == w.call.d && tile.value_pitch == w.call.e) return;
  Slot<T>& slot = w.slots[index % w.slots.size()];
  if (slot.chunk == w.chunk) return;  // in use by another tile of this chunk
  slot.chunk = w.chunk;
  const bool same = slot.key == tile.key && slot.value == tile.value && slot.rate == rate;
  const bool is_cached = same && slot.count >= tile.count;
  T* keys = w.packed_keys + (index % w.slots.size()) * w.call.block * w.d_width;
  T* values = w.packed_values + (index % w.slots.size()) * w.call.block * w.e_width;
  const Index count = is_cached ? 0 : tile.count;
  if (!is_cached) slot = {tile.key, tile.value, rate, tile.count, w.chunk};
  copy_rows(tile.key, tile.key_pitch, count, w.call.d, keys, w.d_width);
  copy_rows(tile.value, tile.value_pitch, count, w.call.e, values, w.e_width);
}

// Gathers the key tiles of a row into w.tiles and calls f(keys) each time the score buffer is full, and at the end.
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
      f(keys);
      w.tiles.clear();
      keys = 0;
      ++w.chunk;
    }
    tile.at = keys;
    keys += tile.count;
    if (w.packing) pack(w, index, q.part.keys.rate, tile);
    w.tiles.push_back(tile);
  };
  for (Index j = row[0]; j < row[1]; ++j) take(row[2] + q.part.full[j], -1);
  for (Index j = row[3]; j < row[4]; ++j) take(row[5] + q.part.partial[j], q.part.mask[j]);
  if (keys) f(keys);
}

// Sets scores to -inf where the bit of a pair is 0. A register holds one mask word of each of its queries; the loop
// over keys tests one bit of all words at a time.
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

template <typename T>
void mask_scores(const Call& call, const QueryTile& q, const Tile<T>& tile, T* scores, Index ld) {
  if (tile.mask >= 0) {
    const std::int32_t* band = call.mask_band + 2 * tile.mask;
    if (band[0] <= band[1]) {
      for (Index j = 0; j < tile.count; ++j) {
        const Index from = std::clamp<Index>(j - band[1], 0, q.lanes);
        const Index to = std::clamp<Index>(j - band[0] + 1, from, q.lanes);
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

// Bounds the scores of a tile by tanh, and stores the derivative for the backward pass.
template <typename T>
void cap_scores(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile) {
  const T cap = T(w.call.softcap), inverse = T(1 / w.call.softcap);
  for (Index j = tile.at; j < tile.at + tile.count; ++j)
    for (Index i = 0; i < q.lanes; i += Lanes<T>::count) {
      T* score = w.scores + j * w.ld + i;
      const Vector<T> ratio = hyperbolic_tangent<T>(load(score) * inverse);
      store(score, ratio * cap);
      if (w.slopes) store(w.slopes + j * w.ld + i, T(1) - ratio * ratio);
    }
}

// Whether the queries of a tile have consecutive entries of the bias table, at any key.
inline bool has_bias_runs(const Call& call, const QueryTile& q) {
  return !call.bias.query_positions && q.part.queries.rate == 1;
}

// Position of a row on an axis of the bias table.
inline Index bias_position(const Bias& b, const std::int64_t* positions, const QueryTile& q, Index row, Index axis) {
  return positions ? positions[q.batch * b.positions_batch + q.head * b.positions_head + row * b.axes + axis] : row;
}

// Loads the positions of the queries of a tile, where entries are computed pair by pair.
template <typename T>
void load_bias_positions(Workspace<T>& w, const QueryTile& q) {
  if (has_bias_runs(w.call, q)) return;
  const Bias& b = w.call.bias;
  for (Index axis = 0; axis < b.axes; ++axis)
    for (Index i = 0; i < q.count; ++i)
      w.bias_at[axis * w.ld + i] = bias_position(b, b.query_positions, q, q.first + q.part.queries.rate * i, axis);
}

// Calls run(row, entry) for each row of a tile whose lanes have consecutive entries from `entry` on, or
// gather(row, entries) with the entry of each lane.
template <typename T, typename OfRun, typename OfLanes>
void for_bias_entries(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile, OfRun&& run, OfLanes&& gather) {
  const Bias& b = w.call.bias;
  for (Index j = 0; j < tile.count; ++j) {
    const Index key = tile.first + q.part.keys.rate * j;
    if (has_bias_runs(w.call, q)) {
      // Below 0 and above width + pad, all lanes lie in the padding.
      run(tile.at + j, std::clamp<Index>(q.first - key + b.width / 2 + b.pad, 0, b.width + b.pad));
      continue;
    }
    const Index *at = w.bias_at + (b.axes - 1) * w.ld;
    const Index shift = b.width / 2 - bias_position(b, b.key_positions, q, key, b.axes - 1);
    for (Index i = 0; i < q.count; ++i) w.entries[i] = b.pad + std::clamp<Index>(at[i] + shift, 0, b.width - 1);
    if (b.axes > 1) {
      const Index row_shift = b.rows / 2 - bias_position(b, b.key_positions, q, key, 0), pitch = b.width + 2 * b.pad;
      for (Index i = 0; i < q.count; ++i)
        w.entries[i] += pitch * std::clamp<Index>(w.bias_at[i] + row_shift, 0, b.rows - 1);
    }
    gather(tile.at + j, w.entries);
  }
}

template <typename T>
void add_bias(const Workspace<T>& w, const QueryTile& q, const Tile<T>& tile) {
  const T* table = static_cast<const T*>(w.call.bias.table) + q.head * w.call.bias.entries();
  const auto run = [&](Index row, Index entry) {
    T* scores = w.scores + row * w.ld;
    for (Index i = 0; i < q.lanes; i += Lanes<T>::count) store(scores + i, load(scores + i) + load(table + entry + i));
  };
  const auto gather = [&](Index row, const Index* entries) {
    T* scores = w.scores + row * w.ld;
    for (Index i = 0; i < q.count; ++i) scores[i] += table[entries[i]];
  };
  for_bias_entries(w, q, tile, run, gather);
}

// Scores of all keys of the chunk, -inf where a pair is not allowed.
template <typename T>
void score(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  for (const Tile<T>& tile : w.tiles) {
    T* scores = w.scores + tile.at * w.ld;
    const Run<T> run{tile.key, call.d, 1};
    product(&run, 1, tile.count, tile.key_pitch, w.query_t, w.ld, q.lanes, scores, w.ld, false, T(call.scale));
    if (call.softcap) cap_scores(w, q, tile);
    if (call.bias.table) add_bias(w, q, tile);
    if (tile.guarded()) mask_scores(call, q, tile, scores, w.ld);
  }
}

// result_t[x][lane] (+)= sum over keys of source[key][x] * weights[key][lane], where source is the keys or the values.
// A masked weight of 0 times NaN would be NaN: rows of guarded tiles with a value that is not finite are excluded from
// the product, and added for the pairs with a weight other than 0.
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

}  // namespace
