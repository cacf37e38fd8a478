// Rows of int32 sums to what is stored: overflow, a sum with another operand, clamps, requantization.
//
// The arithmetic is that of docs/numerics.md (N2, N3, N4, N8, N9). Products must not be contracted into
// fused multiply-adds: see the compiler's options in build.py. These structures are mirrored in library.py.
#pragma once
#include <cstdint>

enum Type : int32_t { U8 = 0, I8 = 1, I16 = 2, I32 = 3, F32 = 4 };
constexpr int BYTES[] = {1, 1, 2, 4, 4};  // of a value of each type
enum Form : int32_t { AS_IS = 0, RATIO = 1, MULTIPLIER = 2, TO_REAL = 3, TWO_STAGE = 4 };
enum Rounding : int32_t { HALF_EVEN = 0, HALF_UP = 1, HALF_AWAY = 2, HALF_DOWN = 3, TOWARD_ZERO = 4, FLOOR = 5 };

// The longest row that is worked on at once; arrays per channel are at least so long, or a row is.
constexpr int ROW = 512;
constexpr int64_t PIECE = 64 * ROW;  // of a pass, what one thread takes at a time

// From one scale to another, then clipped to centered integers.
struct Move {
  int32_t form, rounding;
  int32_t wide;   // the range is more than float32 holds
  int32_t plain;  // a form that `Scaling` of vectors.h has
  int32_t bounded;  // a ratio that leaves sums within int32 before they are clipped
  const float* ratio;         // per channel
  const int32_t* multiplier;  // per channel
  const int32_t* shift;       // per channel, 1 to 62; -31 to 62 in two stages
  double low, high;
  float least, most;  // the same in float32, where it holds them
  const Move* first;  // done before this one; null for none
};

struct Output {
  Move move;
  int32_t type, zero;
  int64_t stride;  // elements from one row to the next
  char* data;
};

struct Addend {
  Move own, other;
  int32_t type, zero;
  int64_t stride;
  const char* data;
};

// What a tail does with its two operands, the one at hand and the one in memory.
enum Sum : int32_t { NONE = 0, PLUS = 1, MINUS = 2, FROM = 3 };  // own + other, own - other, other - own

// What a register does to a sum that may leave it.
struct Register {
  int32_t wrap_bits;  // 0 for none
  int32_t saturates, low, high;

  bool is_idle() const { return !wrap_bits && !saturates; }
};

struct Tail {
  Register sums, added;  // of the sums, and of the sum with another operand
  int32_t clamps, adds, outputs;  // adds: a Sum
  const int32_t* clamp_low;    // of a relu or clamp, per channel
  const int32_t* clamp_high;
  Addend addend;
  Output output[3];
};

// One row of n sums of channels from `channel` on; `column` is where it starts in the stored row.
void finish(int32_t* c, int n, int channel, int64_t row, const Tail& tail, int64_t column);

// n stored integers, centered.
void load(const char* from, int32_t type, int32_t zero, int64_t at, int32_t* c, int n);
