// Atomics and fences. Atomics are relaxed, as on the device: what a block wrote before one reaches another block only
// if a __threadfence stands between the write and the atomic, and between the other block's atomic and its read.
#pragma once
#include "emu.h"

namespace emu {

// The access itself must not be reported as a plain one.
#define EMU_ATOMIC __attribute__((noinline, no_sanitize("thread")))
template <class T> EMU_ATOMIC T atomic_load(const T* p, Order order) {
  check_global(p, sizeof(T));
  atomic_access(p, sizeof(T), Access::LOAD, order);
  return *p;
}
template <class T> EMU_ATOMIC void atomic_store(T* p, T v, Order order) {
  check_global(p, sizeof(T));
  atomic_access(p, sizeof(T), Access::STORE, order);
  *p = v;
}
template <class T, class F> EMU_ATOMIC T atomic_update(T* p, Order order, F f) {
  check_global(p, sizeof(T));
  atomic_access(p, sizeof(T), Access::UPDATE, order);
  const T old = *p;
  *p = f(old);
  return old;
}
#undef EMU_ATOMIC

}  // namespace emu

inline void __threadfence() { emu::fence(); }
inline void __threadfence_block() {}

template <class T> T atomicAdd(T* p, T v) {
  return emu::atomic_update(p, emu::RELAXED, [=](T old) { return T(old + v); });
}
template <class T> T atomicExch(T* p, T v) { return emu::atomic_update(p, emu::RELAXED, [=](T) { return v; }); }
template <class T> T atomicMax(T* p, T v) {
  return emu::atomic_update(p, emu::RELAXED, [=](T old) { return old < v ? v : old; });
}
template <class T> T atomicCAS(T* p, T compare, T v) {
  return emu::atomic_update(p, emu::RELAXED, [=](T old) { return old == compare ? v : old; });
}
