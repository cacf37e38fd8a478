// a * b + c in one rounding, where the processor has that.
#pragma once

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define HAGO_FMA
#endif

inline __attribute__((always_inline)) float fused(float a, float b, float c) {
#ifdef HAGO_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
