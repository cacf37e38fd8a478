// Real values to stored integers.
#pragma once
#include <cstdint>

// The integers round(x / scale) between `low` and `high`, stored with a zero point.
struct Grid {
  float scale, low, high;
  int32_t rounding, type, zero;
};

// n values side by side.
void quantize_row(const float* x, char* out, int64_t n, const Grid& g);
