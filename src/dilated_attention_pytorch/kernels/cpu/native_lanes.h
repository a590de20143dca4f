// Vector types, e^x, tanh, the matrix product that all other products call, and transposes.

#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

using Index = std::int64_t;

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kPanel = 4;
#elif defined(__AVX__)
constexpr int kBytes = 32, kPanel = 2;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kPanel = 4;
#else
constexpr int kBytes = 16, kPanel = 2;
#endif
constexpr int kRows = 6;  // kRows * kPanel accumulators, kPanel operands and a broadcast fill the register file

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  typedef float Vector __attribute__((vector_size(kBytes)));
  typedef float Loose __attribute__((vector_size(kBytes), aligned(4), may_alias));
  typedef std::int32_t Integer __attribute__((vector_size(kBytes)));
  static constexpr int count = kBytes / 4, mantissa = 23;
  // Adding 1.5 * 2^23 rounds to an integer; the bias of the exponent goes with it.
  static constexpr float magic = 12582912.0f + 127.0f, smallest = -126.0f;
  static constexpr float series[] = {1.32764726e-3f, 9.67554134e-3f, 5.55071327e-2f,
                                     2.40221197e-1f, 6.93146967e-1f, 1.00000007f};
  static constexpr float tanh_series[] = {-6.0451651e-3f, 2.09613291e-2f, -5.38432632e-2f, 1.33327188e-1f,
                                          -3.33333284e-1f};
};

template <>
struct Lanes<double> {
  typedef double Vector __attribute__((vector_size(kBytes)));
  typedef double Loose __attribute__((vector_size(kBytes), aligned(8), may_alias));
  typedef std::int64_t Integer __attribute__((vector_size(kBytes)));
  static constexpr int count = kBytes / 8, mantissa = 52;
  static constexpr double magic = 6755399441055744.0 + 1023.0, smallest = -1022.0;
  static constexpr double series[] = {4.43528270695727715e-10, 7.0741056135081428e-9,  1.01781980216719308e-7,
                                      1.32154330896763992e-6,  1.52527334899885256e-5, 1.54035304625144321e-4,
                                      1.33335581467899217e-3,  9.61812910758833524e-3, 5.55041086648199216e-2,
                                      2.40226506959101562e-1,  6.9314718055994533e-1,  1.0};
  static constexpr double tanh_series[] = {
      -1.69257198880615836e-5, 7.89991236309280063e-5,  -2.30297279194274957e-4, 5.87226419141852293e-4,
      -1.45525336200899168e-3, 3.59204982639238555e-3,  -8.86322892311946272e-3, 2.18694882090666463e-2,
      -5.39682539599200255e-2, 1.33333333333250275e-1, -3.33333333333333196e-1};
};

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

template <typename T>
using Vector = typename Lanes<T>::Vector;

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <typename T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename Lanes<T>::Loose*>(from);
}

template <typename T>
inline void store(T* to, Vector<T> x) {
  *reinterpret_cast<typename Lanes<T>::Loose*>(to) = x;
}

template <typename T>
inline Vector<T> maximum(Vector<T> a, Vector<T> b) {
  return a > b ? a : b;
}

// e^x as a power of two times a minimax polynomial on [-1/2, 1/2]. Exactly 0 below the normal range and at -inf;
// NaN stays NaN because the power of two is multiplied in, not added to the exponent bits.
template <typename T>
inline Vector<T> exponential(Vector<T> x) {
  using L = Lanes<T>;
  const Vector<T> shifted = x * T(kLog2E) + L::magic;
  const Vector<T> r = x * T(kLog2E) - (shifted - L::magic);
  Vector<T> p = r * L::series[0] + L::series[1];
  for (int i = 2; i < int(std::size(L::series)); ++i) p = p * r + L::series[i];
  const auto power = reinterpret_cast<Vector<T>>(reinterpret_cast<typename L::Integer>(shifted) << L::mantissa);
  const Vector<T> zero = {};
  return x < L::smallest * T(kLn2) ? zero : p * power;
}

// tanh x: x + x^3 p(x^2) with a minimax polynomial where |x| < 0.625, which keeps the relative precision of small x,
// and (1 - e^(-2|x|)) / (1 + e^(-2|x|)) elsewhere. NaN stays NaN.
template <typename T>
inline Vector<T> hyperbolic_tangent(Vector<T> x) {
  using L = Lanes<T>;
  const Vector<T> size = x < T(0) ? -x : x, square = x * x, decay = exponential<T>(size * T(-2));
  Vector<T> p = square * L::tanh_series[0] + L::tanh_series[1];
  for (int i = 2; i < int(std::size(L::tanh_series)); ++i) p = p * square + L::tanh_series[i];
  const Vector<T> large = (T(1) - decay) / (T(1) + decay);
  return size < T(0.625) ? x + x * square * p : x < T(0) ? -large : large;
}

inline Index round_up(Index x, Index to) { return (x + to - 1) / to * to; }

// Calls f(vectors, first lane) for each strip of lanes; `vectors` is the compile-time width of the strip, kPanel
// vectors and fewer at the end.
template <typename T, typename F>
inline void for_strips(Index lanes, F&& f) {
  constexpr Index w = Lanes<T>::count;
  Index x = 0;
  for (; x + kPanel * w <= lanes; x += kPanel * w) f(std::integral_constant<int, kPanel>{}, x);
  if constexpr (kPanel > 2)
    if (x + 2 * w <= lanes) f(std::integral_constant<int, 2>{}, x), x += 2 * w;
  if (x < lanes) f(std::integral_constant<int, 1>{}, x);
}

template <typename T>
inline void fetch(const T* row, Index width) {
  for (Index x = 0; x < width; x += 64 / Index(sizeof(T))) __builtin_prefetch(row + x, 0, 2);
}

// Range of the summation index k in which the address of A[i, k] advances by a constant step.
template <typename T>
struct Run {
  const T* a;
  Index length, step;
};

template <typename T, int R, int P>
inline void product_block(const Run<T>* runs, Index run_count, Index offset, Index row, const T* b, Index ldb, T* c,
                          Index ldc, bool add, T factor) {
  constexpr int w = Lanes<T>::count;
  Vector<T> sum[R][P] = {};
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) __builtin_prefetch(c + r * ldc + p * w, 1);
  for (Index j = 0; j < run_count; ++j) {
    const T* a = runs[j].a + offset;
    const Index step = runs[j].step;
    for (Index k = 0; k < runs[j].length; ++k, a += step, b += ldb) {
      Vector<T> operand[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) operand[p] = load(b + p * w);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const T x = a[r * row];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sum[r][p] += operand[p] * x;
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      T* to = c + r * ldc + p * w;
      store(to, add ? load(to) + sum[r][p] : sum[r][p] * factor);
    }
}

// C[i][lanes] (+)= sum over k of A[i, k] * B[k][lanes], with A[i, k] = a[i * row + k * step] along each run, summed in
// the order of k. Without `add` the sum is multiplied by `factor`.
template <typename T>
void product(const Run<T>* runs, Index run_count, Index rows, Index row, const T* b, Index ldb, Index lanes, T* c,
             Index ldc, bool add, T factor = 1) {
  for_strips<T>(lanes, [&](auto vectors, Index x) {
    constexpr int P = decltype(vectors)::value;
    Index i = 0;
    const auto block = [&](auto height) {
      constexpr int R = decltype(height)::value;
      product_block<T, R, P>(runs, run_count, i * row, row, b + x, ldb, c + i * ldc + x, ldc, add, factor);
    };
    for (; i + kRows <= rows; i += kRows) block(std::integral_constant<int, kRows>{});
    switch (rows - i) {
      case 5: block(std::integral_constant<int, 5>{}); break;
      case 4: block(std::integral_constant<int, 4>{}); break;
      case 3: block(std::integral_constant<int, 3>{}); break;
      case 2: block(std::integral_constant<int, 2>{}); break;
      case 1: block(std::integral_constant<int, 1>{}); break;
    }
  });
}

template <typename T>
T dot(const T* a, const T* b, Index width) {
  constexpr int w = Lanes<T>::count;
  Vector<T> sums = {};
  Index x = 0;
  for (; x + w <= width; x += w) sums += load(a + x) * load(b + x);
  T sum = 0;
  for (int lane = 0; lane < w; ++lane) sum += sums[lane];
  for (; x < width; ++x) sum += a[x] * b[x];
  return sum;
}

template <typename T>
bool all_finite(const T* row, Index width) {
  constexpr int w = Lanes<T>::count;
  Vector<T> poison = {};
  Index x = 0;
  for (; x + w <= width; x += w) poison += load(row + x) * T(0);
  T any = 0;
  for (int lane = 0; lane < w; ++lane) any += poison[lane];
  for (; x < width; ++x) any += row[x] * T(0);
  return any == 0;
}

// Transposes a square of registers: each stage exchanges the off-diagonal blocks of squares half the size.
template <typename T, int step = Lanes<T>::count / 2>
inline void transpose(Vector<T>* rows) {
  constexpr int w = Lanes<T>::count;
  typename Lanes<T>::Integer low, high;
  for (int lane = 0; lane < w; ++lane) {
    low[lane] = lane & step ? w + lane - step : lane;
    high[lane] = lane & step ? w + lane : lane + step;
  }
#pragma GCC unroll 16
  for (int i = 0; i < w; ++i)
    if (!(i & step)) {
      const Vector<T> a = rows[i], b = rows[i + step];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + step] = __builtin_shuffle(a, b, high);
    }
  if constexpr (step > 1) transpose<T, step / 2>(rows);
}

// to[x][i] = from(i)[x] * factor for the rows i < count; lanes up to a whole register become 0.
template <typename T, typename Row>
void transpose_in(Row from, Index count, Index width, T factor, T* to, Index ld) {
  constexpr int w = Lanes<T>::count;
  for (Index i = 0; i < count; i += w) {
    Index x = 0;
    for (; x + w <= width; x += w) {
      Vector<T> rows[w];
      for (int lane = 0; lane < w; ++lane)
        rows[lane] = i + lane < count ? load(from(i + lane) + x) * factor : Vector<T>{};
      transpose<T>(rows);
      for (int lane = 0; lane < w; ++lane) store(to + (x + lane) * ld + i, rows[lane]);
    }
    for (; x < width; ++x)
      for (int lane = 0; lane < w; ++lane) to[x * ld + i + lane] = i + lane < count ? from(i + lane)[x] * factor : T(0);
  }
}

// to(i)[x] (+)= from[x][i] * factor[i] for the rows i < count.
template <typename T, typename Row>
void transpose_out(const T* from, Index ld, Index count, Index width, Row to, const T* factor, bool add) {
  constexpr int w = Lanes<T>::count;
  for (Index i = 0; i < count; i += w) {
    const Index lanes = count - i < w ? count - i : w;
    Index x = 0;
    for (; x + w <= width; x += w) {
      Vector<T> rows[w];
      for (int lane = 0; lane < w; ++lane) rows[lane] = load(from + (x + lane) * ld + i);
      transpose<T>(rows);
      for (Index lane = 0; lane < lanes; ++lane) {
        T* row = to(i + lane) + x;
        const Vector<T> values = rows[lane] * factor[i + lane];
        store(row, add ? load(row) + values : values);
      }
    }
    for (; x < width; ++x)
      for (Index lane = 0; lane < lanes; ++lane) {
        T* row = to(i + lane) + x;
        const T value = from[x * ld + i + lane] * factor[i + lane];
        *row = add ? *row + value : value;
      }
  }
}

}  // namespace
