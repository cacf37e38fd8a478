// Products of rows of values by the weights of a panel of output channels.
#pragma once
#include "lanes.h"
#include "rows.h"

constexpr Type TURNED = TURNS_UNSIGNED ? U8 : I8;  // read with the highest bit turned

// Rows of a tile of 16 * Z channels: as many as there are registers for their sums.
#ifdef HAGO_AVX512
constexpr int ROWS_OF[] = {0, 14, 12, 8, TALLEST};
#else
constexpr int ROWS_OF[] = {0, TALLEST};
#endif
constexpr int MOST_ROWS = ROWS_OF[1];

// Bytes of the weights of a panel, which come from the second cache, that are on their way to the first.
constexpr int AHEAD = 2048;

// `depth` bytes of each window by those of the weights, of which four lie side by side for every channel.
template <int R, int Z, Type X>
ALWAYS void accumulate(Ints (&acc)[R][Z], const uint8_t* const* x, const int8_t* w, int depth) {
  for (int k = 0; k < depth; k += 4, w += 64 * Z) {
    Ints b[Z];
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) b[z] = load_packed(w + 64 * z);
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) __builtin_prefetch(w + 64 * z + AHEAD);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Ints a = all_packed(x[r] + k);
      if (X == TURNED) a = turn(a);
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) acc[r][z] = X == I16 ? dot_words(acc[r][z], a, b[z]) : dot_bytes(acc[r][z], a, b[z]);
    }
  }
}

#ifdef HAGO_PAIRS
// The same of words, for the first eight channels of a panel.
template <int R>
ALWAYS void accumulate_half(Ints (&acc)[R][1], const uint8_t* const* x, const int8_t* w, int depth) {
  for (int k = 0; k < depth; k += 4, w += 64) {
    const Vec b = load_vec(w);
    __builtin_prefetch(w + AHEAD);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r][0].low = dot_vec(acc[r][0].low, all_packed(x[r] + k).low, b);
  }
}
#endif
