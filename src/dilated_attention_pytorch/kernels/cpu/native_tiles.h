// What the kernel is given, and what one thread does with the key tiles that one query tile meets.

#pragma once

#include "native_lanes.h"

#include <algorithm>
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
  const std::int64_t *query_positions, *key_positions;  // (heads, n): tokens that rows stand for in dropout, or null
  Array query, key, value, output, lse, grad_output, grad_lse, grad_query;
  const Array *grad_key, *grad_value;  // one of each for every split
};

}  // extern "C"

namespace {

constexpr Index kChunkKeys = 128;    // keys computed together: a strip of their weights stays in the first cache
constexpr Index kPackedKeys = 4096;  // keys a thread holds dense copies of

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

// Which key tile a dense copy holds. Keys may share memory where values do not, and the other way round.
template <typename T>
struct Slot {
  const T *key, *value;
  Index rate, count, chunk;
};

// What one thread needs for one query tile. Transposed arrays have `ld` lanes a row: odd in cache lines, because
// strips of a power-of-two pitch would fight for the same cache sets.
template <typename T>
struct Workspace {
  const Call& call;
  const Index ld, d_width, e_width, keys;
  std::vector<void*> owned;
  T *query_t, *grad_output_t, *result_t, *scores, *grad_scores;
  T *query_rows, *grad_rows, *clean, *packed_keys, *packed_values;
  T *top, *total, *share, *delta;
  std::uint32_t* stream;
  bool packing;
  Index chunk = 0;
  std::vector<Slot<T>> slots;
  std::vector<Tile<T>> tiles;
  std::vector<Run<T>> runs;
  std::vector<Index> bad, bad_queries, bad_grads;

  Workspace(const Call& c, bool backward)
      : call(c),
        ld(round_up(c.block, Lanes<T>::count) + Lanes<T>::count),
        d_width(round_up(c.d, Lanes<T>::count) + Lanes<T>::count),
        e_width(round_up(c.e, Lanes<T>::count) + Lanes<T>::count),
        keys(std::max(c.block, kChunkKeys)) {
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

// Points a tile whose rows lie far apart at a dense copy. Rows at a power-of-two distance fall into a few cache sets
// and push each other out; neighbouring query tiles mostly meet the same keys, so that a copy serves many of them.
template <typename T>
void pack(Workspace<T>& w, Index index, Index rate, Tile<T>& tile) {
  if (tile.key_pitch == w.call.d && tile.value_pitch == w.call.e) return;
  Slot<T>& slot = w.slots[index % w.slots.size()];
  if (slot.chunk == w.chunk) return;  // in use by another tile of this chunk
  slot.chunk = w.chunk;
  const bool same = slot.key == tile.key && slot.value == tile.value && slot.rate == rate;
  const bool there = same && slot.count >= tile.count;
  T* keys = w.packed_keys + (index % w.slots.size()) * w.call.block * w.d_width;
  T* values = w.packed_values + (index % w.slots.size()) * w.call.block * w.e_width;
  const Index count = there ? 0 : tile.count;
  if (!there) slot = {tile.key, tile.value, rate, tile.count, w.chunk};
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

// Scores of all keys of the chunk, -inf where a pair is not allowed.
template <typename T>
void score(Workspace<T>& w, const QueryTile& q) {
  const Call& call = w.call;
  for (const Tile<T>& tile : w.tiles) {
    T* scores = w.scores + tile.at * w.ld;
    const Run<T> run{tile.key, call.d, 1};
    product(&run, 1, tile.count, tile.key_pitch, w.query_t, w.ld, q.lanes, scores, w.ld, false, T(call.scale));
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

}  // namespace
