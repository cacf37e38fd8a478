// Rows of sums to their tail, in vectors where the tail allows it.
#pragma once
#include "vectors.h"

// The first of `rows` rows, `pitch` from one to the next, is row `row` of what is stored, from `column` on.
inline void finish_rows(const Tail& t, int32_t* sums, int rows, int pitch, int width, int channel, int64_t row,
                        int64_t column) {
  if (is_plain(t)) return finish_tile({sums, rows, pitch, width, channel, row, column}, t);
  for (int r = 0; r < rows; ++r) finish(sums + r * pitch, width, channel, row + r, t, column);
}
