// CUDA's short vectors, with its alignments.
#pragma once

#define EMU_VECTORS(T, name)                                                          \
  struct name##1 { T x; };                                                            \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                  \
  struct name##3 { T x, y, z; };                                                      \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };  \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                          \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(float, float)
#undef EMU_VECTORS
