// What the race detector is told. Without CHEETAH_EMULATOR_SANITIZE every function here is empty.
//
// Fibres are switched without synchronisation; happens-before comes only from `release` and `acquire` on an address,
// called where the emulated machine really orders memory.
#pragma once

#include <cstdint>
#include <cstdio>

#if defined(CHEETAH_EMULATOR_SANITIZE)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read8_pc(void* address, void* pc);
void __tsan_write8_pc(void* address, void* pc);
void __tsan_read_range_pc(void* address, unsigned long bytes, void* pc);
void __tsan_write_range_pc(void* address, unsigned long bytes, void* pc);
void __tsan_func_entry(void* pc);
void __tsan_func_exit(void);
}
#endif

namespace cheetah_emulator::sanitizer {

#if defined(CHEETAH_EMULATOR_SANITIZE)
constexpr bool enabled = true;
constexpr unsigned without_synchronisation = 1;

inline void* current_fibre() { return __tsan_get_current_fiber(); }
// The new fibre begins after everything that the running one has done.
inline void* create_fibre(const char* name) {
  void* fibre = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fibre, name);
  return fibre;
}
inline void destroy_fibre(void* fibre) { __tsan_destroy_fiber(fibre); }
inline void switch_to(void* fibre) { __tsan_switch_to_fiber(fibre, without_synchronisation); }
inline void acquire(const char& address) { __tsan_acquire(const_cast<char*>(&address)); }
inline void release(const char& address) { __tsan_release(const_cast<char*>(&address)); }
inline void read8(const void* address, const void* caller) {
  __tsan_read8_pc(const_cast<void*>(address), const_cast<void*>(caller));
}
inline void write8(void* address, const void* caller) { __tsan_write8_pc(address, const_cast<void*>(caller)); }
inline void read_range(const void* address, uint64_t bytes, const void* caller) {
  __tsan_read_range_pc(const_cast<void*>(address), bytes, const_cast<void*>(caller));
}
inline void write_range(void* address, uint64_t bytes, const void* caller) {
  __tsan_write_range_pc(address, bytes, const_cast<void*>(caller));
}
#else
constexpr bool enabled = false;
inline void* current_fibre() { return nullptr; }
inline void* create_fibre(const char*) { return nullptr; }
inline void destroy_fibre(void*) {}
inline void switch_to(void*) {}
inline void acquire(const char&) {}
inline void release(const char&) {}
inline void read8(const void*, const void*) {}
inline void write8(void*, const void*) {}
inline void read_range(const void*, uint64_t, const void*) {}
inline void write_range(void*, uint64_t, const void*) {}
#endif

}  // namespace cheetah_emulator::sanitizer
