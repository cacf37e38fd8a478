// Real numbers to whole ones, in the ways of docs/numerics.md (N1).
#pragma once
#include "rows.h"

template <int ROUNDING>
inline float rounded(float x) {
  float r = __builtin_rintf(x);
  if (ROUNDING == HALF_UP) r += (x - r == 0.5f) ? 1.0f : 0.0f;
  if (ROUNDING == HALF_DOWN) r -= (r - x == 0.5f) ? 1.0f : 0.0f;
  if (ROUNDING == HALF_AWAY) r = __builtin_fabsf(x - r) == 0.5f ? x + __builtin_copysignf(0.5f, x) : r;
  if (ROUNDING == TOWARD_ZERO) r = __builtin_truncf(x);
  if (ROUNDING == FLOOR) r = __builtin_floorf(x);
  return r;
}
