// Layer norms of rows of floats, with the bits of torch's, and the integers that they are quantized to.
//
// torch takes the mean of a row and its squared deviations in W floats side by side: entry by entry (Welford, "Note on a
// method for calculating corrected sums of squares and products", Technometrics 4, 1962) for a few registers at a time,
// whose moments it then joins in pairs (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
// computing sample variances", 1979), and those of the W floats one after the other. Which products and sums are one
// rounding is a part of it. The self-test of the kernels compares rows with those of the torch that is installed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fused.h"
#include "lanes.h"
#include "quantize.h"
#include "rows.h"

namespace {

constexpr int W = 8;          // floats in a register of torch's
constexpr int CHUNK = 16;     // registers whose moments are taken entry by entry
constexpr int TOGETHER = 16;  // rows that are worked on at once

// Where the values of a row go: to floats, if the type is F32, else to integers.
struct NormOutput {
  Grid grid;
  char* data;
};

struct Norm {
  int64_t rows, columns;
  float epsilon;
  int32_t outputs;
  const float *weight, *bias;  // null for ones and zeros
  const NormOutput* output;
};

// What torch has in a register.
typedef float Register __attribute__((vector_size(W * sizeof(float))));

using ::fused;
ALWAYS Register fused(Register a, Register b, Register c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int k = 0; k < W; ++k) c[k] = fused(a[k], b[k], c[k]);
  return c;
#endif
}
ALWAYS Register all(float x) { return x - Register{}; }
ALWAYS Register load(const float* at) {
  Register x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}

// The mean of some entries of each lane, and the sum of their squared deviations from it.
struct Moments {
  int64_t count = 0;
  Register mean = {}, squares = {};
};

constexpr float SHARES[CHUNK] = {1.0f,      1.0f / 2,  1.0f / 3,  1.0f / 4,  1.0f / 5,  1.0f / 6,  1.0f / 7,  1.0f / 8,
                                 1.0f / 9,  1.0f / 10, 1.0f / 11, 1.0f / 12, 1.0f / 13, 1.0f / 14, 1.0f / 15, 1.0f / 16};

ALWAYS Moments of_chunk(const float* x, int64_t registers) {
  Register mean = {}, squares = {};
  for (int64_t i = 0; i < registers; ++i) {
    const Register value = load(x + i * W), off = value - mean;
    mean = fused(all(SHARES[i]), off, mean);
    squares = fused(off, value - mean, squares);
  }
  return {registers, mean, squares};
}

ALWAYS void join(Moments& m, const Moments& other) {
  const int64_t count = m.count + other.count;
  const float share = count ? (float)other.count / (float)count : 0.0f;
  const Register off = other.mean - m.mean, step = share * off;
  m.squares = fused(off * (float)m.count, step, m.squares + other.squares);
  m.mean += step;
  m.count = count;
}

// Of whole registers; `levels` has room for the pairs that wait.
Moments of_registers(const float* x, int64_t registers, std::vector<Moments>& levels) {
  const int64_t chunks = (registers + CHUNK - 1) / CHUNK;
  if (chunks <= 1) {
    Moments m;
    join(m, of_chunk(x, registers));
    return m;
  }
  std::fill(levels.begin(), levels.end(), Moments());
  for (int64_t i = 0; i < chunks; ++i) {
    join(levels[0], of_chunk(x + i * CHUNK * W, std::min<int64_t>(CHUNK, registers - i * CHUNK)));
    int64_t made = i + 1;
    for (size_t j = 1; j < levels.size() && !(made & 1); ++j, made >>= 1) {
      join(levels[j], levels[j - 1]);
      levels[j - 1] = Moments();
    }
  }
  for (size_t j = 1; j < levels.size(); ++j) join(levels[0], levels[j]);
  return levels[0];
}

// Rows at once: their means, and what brings their variance to 1.
struct Rows {
  float lanes[2][W][TOGETHER];  // moments of the lanes
  float mean[TOGETHER], squares[TOGETHER], factor[TOGETHER];

  void put(int row, const float* x, int64_t columns, std::vector<Moments>& levels) {
    const int64_t registers = columns / W;
    const Moments m = of_registers(x, registers, levels);
    for (int k = 0; k < W; ++k) {
      lanes[0][k][row] = m.mean[k];
      lanes[1][k][row] = m.squares[k];
    }
    float all = 0, sum = 0;
    for (int64_t i = registers * W; i < columns; ++i) {
      const float off = x[i] - all;
      all += off / (float)(i - registers * W + 1);
      sum += off * (x[i] - all);
    }
    mean[row] = all;
    squares[row] = sum;
  }

  void end(int64_t columns, float epsilon) {
    const int64_t registers = columns / W;
    for (int64_t k = 0, count = columns % W; k < W; ++k, count += registers) {
      const float share = count + registers ? (float)registers / (float)(count + registers) : 0.0f;
      for (int r = 0; r < TOGETHER; ++r) {
        const float off = lanes[0][k][r] - mean[r];
        mean[r] = fused(share, off, mean[r]);
        squares[r] += fused(off * off * share, (float)count, lanes[1][k][r]);
      }
    }
    for (int r = 0; r < TOGETHER; ++r) factor[r] = 1.0f / std::sqrt(squares[r] / (float)columns + epsilon);
  }
};

// One row, of which `y` has room for the values.
void normalize(const Norm& norm, const float* x, float mean, float factor, int64_t row, float* y) {
  const int64_t n = norm.columns;
  const float *weight = norm.weight, *bias = norm.bias;
  if (weight && bias)
    for (int64_t i = 0; i < n; ++i) y[i] = fused((x[i] - mean) * factor, weight[i], bias[i]);
  else if (weight)
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * factor * weight[i] + 0.0f;
  else if (bias)
    for (int64_t i = 0; i < n; ++i) y[i] = fused(x[i] - mean, factor, bias[i]);
  else
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * factor + 0.0f;
  for (int k = 0; k < norm.outputs; ++k) {
    const NormOutput& o = norm.output[k];
    char* to = o.data + row * n * BYTES[o.grid.type];
    if (o.grid.type == F32) std::copy(y, y + n, (float*)to);
    else quantize_row(y, to, n, o.grid);
  }
}

int64_t levels_of(int64_t chunks) {
  int64_t levels = 0;
  while (((int64_t)1 << levels) < chunks) ++levels;
  return std::max<int64_t>(levels, 1);
}

}  // namespace

// N1 of docs/numerics.md for every output that is no float.
extern "C" void hago_norm(const Norm* norm, const float* x, int threads) {
  const int64_t n = norm->columns, blocks = (norm->rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel num_threads(threads) if (threads > 1 && blocks > 1)
  {
    std::vector<Moments> levels(levels_of((n / W + CHUNK - 1) / CHUNK));
    std::vector<float> y(n);
    Rows rows = {};
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * TOGETHER;
      const int some = (int)std::min<int64_t>(TOGETHER, norm->rows - first);
      for (int r = 0; r < some; ++r) rows.put(r, x + (first + r) * n, n, levels);
      rows.end(n, norm->epsilon);
      for (int r = 0; r < some; ++r)
        normalize(*norm, x + (first + r) * n, rows.mean[r], rows.factor[r], first + r, y.data());
    }
  }
}
