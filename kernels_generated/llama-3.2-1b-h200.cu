// The whole decode step of a Llama model in one persistent kernel. Generated; do not edit.
// Regenerate with: cheetah generate llama-3.2-1b
//
// model: hidden 2048, ffn 8192, vocab 128256, heads 32, kv_heads 8, head_dim 64, layers 16
// machine: h200, 132 blocks of 288 threads: 8 math warps, one copies
// plan: math_warps 8, stage_bytes 16384, stages 12, in_flight 3, sync flags, page_size 16, max_context 8192, batch 1, max_steps 64, kv_align 16, kv_chunk_min 256, start_qkv 4, start_residual 0, start_gate_up 4, start_head 4, trace False
// weights read a step: 2471493632 bytes, in 121634816 a layer
// shared memory:
//     offset    bytes  region
//          0   196608  ring
//     196608      192  ring_barriers
//     196864    16384  scratch
//     196864    16384  vector  (over scratch)
//     196864     8192  attention  (over scratch)
//     213248     1024  reductions
//     214272       64  residual
//     214336       32  partial_sums
//     214368      256  rope
//     214624      768  queries
//     215392      576  statistics
//     215968     1056  candidates
//     217024       16  step_done
//     217040        8  next_token
//              217048  total
//              232448  a block has, 15400 free

#ifdef CHEETAH_EMULATOR
#include "cheetah_emulator.h"
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef int int32_t;
typedef long int64_t;
struct bf16 { uint16_t bits; };

__device__ __forceinline__ uint8_t* shared_arena() {
  extern __shared__ __align__(1024) uint8_t cheetah_shared_memory[];
  return cheetah_shared_memory;
}

__device__ __forceinline__ void block_barrier() {
  __syncthreads();
}

__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void warp_barrier() {
  __syncwarp();
}

__device__ __forceinline__ float shuffle_xor_f32(float value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ uint32_t shuffle_xor_u32(uint32_t value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ float warp_sum_f32(float value) {
  #pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value = value + __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
    :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
    "{\n\t.reg .pred done;\n\t"
    "again:\n\t"
    "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
    "@!done bra again;\n\t}"
    :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_copy(void* destination, const void* source, uint32_t bytes, uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1], %2, [%3], %4;"
    :: "r"(shared_address(destination)), "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
    : "memory");
}

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(place) : "memory");
}

__device__ __forceinline__ void publish_flagged(uint64_t* place, uint32_t data, uint32_t epoch) {
  uint64_t word = (uint64_t)epoch << 32 | data;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(place), "l"(word) : "memory");
}

__device__ __forceinline__ void publish_flagged_release(uint64_t* place, uint32_t data, uint32_t epoch) {
  uint64_t word = (uint64_t)epoch << 32 | data;
  asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(place), "l"(word) : "memory");
}

__device__ __forceinline__ uint4 wait_flagged4(const uint64_t* words, uint32_t epoch) {
  uint64_t a, b, c, d;
  do {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(c), "=l"(d) : "l"(words + 2) : "memory");
  } while ((uint32_t)(a >> 32) != epoch || (uint32_t)(b >> 32) != epoch ||
           (uint32_t)(c >> 32) != epoch || (uint32_t)(d >> 32) != epoch);
  return make_uint4((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
}

__device__ __forceinline__ void wait_flagged_units(uint4 (&data)[8], const uint64_t* words, uint32_t stride, uint32_t count, uint32_t epoch) {
  uint64_t word[8][4];
  bool missing;
  do {
    missing = false;
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        const uint64_t* place = words + i * stride;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
          : "=l"(word[i][0]), "=l"(word[i][1]) : "l"(place) : "memory");
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
          : "=l"(word[i][2]), "=l"(word[i][3]) : "l"(place + 2) : "memory");
      }
    }
    #pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      if (i < count) {
        #pragma unroll
        for (uint32_t j = 0; j < 4; ++j) missing |= (uint32_t)(word[i][j] >> 32) != epoch;
        data[i] = make_uint4((uint32_t)word[i][0], (uint32_t)word[i][1], (uint32_t)word[i][2], (uint32_t)word[i][3]);
      }
    }
  } while (missing);
}

__device__ __forceinline__ uint4 wait_flagged4_acquire(const uint64_t* words, uint32_t epoch) {
  uint64_t a, b, c, d;
  do {
    asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
    asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(c), "=l"(d) : "l"(words + 2) : "memory");
  } while ((uint32_t)(a >> 32) != epoch || (uint32_t)(b >> 32) != epoch ||
           (uint32_t)(c >> 32) != epoch || (uint32_t)(d >> 32) != epoch);
  return make_uint4((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
}

__device__ __forceinline__ void store_relaxed_u32(uint32_t* place, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_constant_u32(const void* place) {
  uint32_t result;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(result) : "l"(place));
  return result;
}

__device__ __forceinline__ uint4 load_constant_u32x4(const void* place) {
  uint4 result;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
    : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w) : "l"(place));
  return result;
}

__device__ __forceinline__ uint32_t float_bits(float value) {
  return __float_as_uint(value);
}

__device__ __forceinline__ float bits_float(uint32_t bits) {
  return __uint_as_float(bits);
}

__device__ __forceinline__ float bf16_to_f32(bf16 value) {
  return __uint_as_float((uint32_t)value.bits << 16);
}

__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ float bf16x2_low(uint32_t pair) {
  return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float bf16x2_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

__device__ __forceinline__ uint32_t multiply_high_u32(uint32_t a, uint32_t b) {
  return __umulhi(a, b);
}

__device__ __forceinline__ float exp2_f32(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float exp_f32(float value) {
  return __expf(value);
}

__device__ __forceinline__ float log_f32(float value) {
  return logf(value);
}

__device__ __forceinline__ float rsqrt_f32(float value) {
  return rsqrtf(value);
}

__device__ __forceinline__ float divide_f32(float a, float b) {
  return __fdividef(a, b);
}

__device__ __forceinline__ float maximum_f32(float a, float b) {
  return fmaxf(a, b);
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t matrix_transpose_b16(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

__device__ __forceinline__ uint4 make_u32x4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return make_uint4(x, y, z, w);
}
#endif

extern "C" __global__ void __launch_bounds__(288, 1) decode_step(const uint8_t* weights, const bf16* norms, const bf16* embedding, const float* rope, bf16* kv, const int32_t* page_table, const int32_t* kv_plans, uint8_t* exchange, int32_t* tokens, const int32_t* stop_ids, float* logits, uint32_t* progress, int32_t* status, uint32_t length, uint32_t given, uint32_t steps, uint32_t plan_count, uint32_t stop_count, uint32_t epoch, float temperature, uint64_t seed) {
  uint8_t* arena = shared_arena();
  uint32_t block = blockIdx.x;
  uint32_t thread = threadIdx.x;
  uint32_t warp = thread / 32;
  uint32_t lane = thread % 32;
  uint64_t* exchange_words = (uint64_t*)(exchange);
  uint64_t* full = (uint64_t*)(arena + 196608);
  uint64_t* empty = full + 12;
  uint64_t* step_done = (uint64_t*)(arena + 217024);
  uint32_t* next_token = (uint32_t*)(arena + 217040);
  if (thread == 0) {
    for (uint32_t stage = 0; stage < 12; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, 8);
    }
    mbarrier_init(step_done, 1);
    mbarrier_init(step_done + 1, 1);
    mbarrier_fence_init();
    next_token[0] = (uint32_t)(tokens[0]);
  }
  block_barrier();
  if (warp == 8) {
    // the copy warp: one lane walks the whole model's chunk list
    if (lane == 0) {
      uint32_t plan_index = 0;
      uint32_t fill_stage = 0;
      uint32_t fill_parity = 1;
      uint32_t landed_stage = 9;
      uint32_t landed_parity = 1;
      for (uint32_t step = 0; step < steps; ++step) {
        uint32_t following = plan_index + 1;
        if (following < plan_count) {
          uint32_t first_step = load_constant_u32(kv_plans + following * 2880);
          if (first_step <= step) {
            plan_index = following;
          }
        }
        for (uint32_t layer = 0; layer < 16; ++layer) {
          uint64_t layer_offset = (uint64_t)(layer) * 121634816;
          // qkv
          uint32_t position = (block + 4) % 132;
          const uint8_t* matrix = weights + layer_offset;
          #pragma unroll 1
          for (uint32_t strip = position; strip < 192; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 8650752;
            uint32_t width = 132 - round * 72;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 4; ++chunk) {
              const uint8_t* source = matrix + (round_bytes + (uint64_t)(width * chunk * 16384 + position * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = arena + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // keys and values of earlier tokens
          if (layer == 0) {
            if (step > 0) {
              mbarrier_wait(step_done, (step + 1) % 2);
              fence_proxy_async();
              uint32_t stop = next_token[1];
              mbarrier_arrive(step_done + 1);
              if (stop != 0) {
                return;
              }
            }
          }
          uint32_t first_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 64)));
          uint32_t last_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 1 + 64)));
          #pragma unroll 1
          for (uint32_t item = first_item; item < last_item; ++item) {
            uint32_t head = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 2 + 256)));
            uint32_t begin = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 3 + 256)));
            uint32_t end = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 4 + 256)));
            uint32_t slot = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 5 + 256)));
            uint32_t end_2 = end < length + step ? end : length + step;
            #pragma unroll 1
            for (uint32_t first = begin; first < end_2; first += 64) {
              uint32_t count = end_2 - first < 64 ? end_2 - first : 64;
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = arena + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, count * 256);
              uint32_t done = 0;
              while (done < count) {
                uint32_t token = first + done;
                uint32_t run = 16 - token % 16 < count - done ? 16 - token % 16 : count - done;
                uint32_t page = load_constant_u32(page_table + token / 16);
                uint64_t offset = (uint64_t)(layer) * 8388608 + (uint64_t)(page) * 16384;
                bf16* key = kv + (offset + (uint64_t)(head * 1024 + token % 16 * 64));
                bulk_copy(destination + done * 128, key, run * 128, barrier);
                uint8_t* values = destination + (done * 128 + 8192);
                bulk_copy(values, key + 8192, run * 128, barrier);
                done = done + run;
              }
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // o
          uint32_t position_2 = block % 132;
          uint64_t first_byte = layer_offset + 12582912;
          const uint8_t* matrix_2 = weights + first_byte;
          #pragma unroll 1
          for (uint32_t strip = position_2; strip < 128; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 8650752;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 4; ++chunk) {
              const uint8_t* source = matrix_2 + (round_bytes + (uint64_t)(128 * chunk * 16384 + position_2 * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = arena + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // gate_up
          uint32_t position_3 = (block + 4) % 132;
          uint64_t first_byte_2 = layer_offset + 20971520;
          const uint8_t* matrix_3 = weights + first_byte_2;
          #pragma unroll 1
          for (uint32_t strip = position_3; strip < 1024; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 8650752;
            uint32_t width = 132 - round / 7 * 32;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 4; ++chunk) {
              const uint8_t* source = matrix_3 + (round_bytes + (uint64_t)(width * chunk * 16384 + position_3 * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = arena + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
          // down
          uint32_t position_4 = block % 132;
          uint64_t first_byte_3 = layer_offset + 88080384;
          const uint8_t* matrix_4 = weights + first_byte_3;
          #pragma unroll 1
          for (uint32_t strip = position_4; strip < 128; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 34603008;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 16; ++chunk) {
              const uint8_t* source = matrix_4 + (round_bytes + (uint64_t)(128 * chunk * 16384 + position_4 * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = arena + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
        }
        // head
        if (step + 1 >= given || logits != nullptr) {
          uint32_t position = (block + 4) % 132;
          const uint8_t* matrix = weights + 1946157056;
          #pragma unroll 1
          for (uint32_t strip = position; strip < 8016; strip += 132) {
            uint32_t round = strip / 132;
            uint64_t round_bytes = (uint64_t)(round) * 8650752;
            uint32_t width = 132 - round / 60 * 36;
            #pragma unroll 1
            for (uint32_t chunk = 0; chunk < 4; ++chunk) {
              const uint8_t* source = matrix + (round_bytes + (uint64_t)(width * chunk * 16384 + position * 16384));
              mbarrier_wait(empty + fill_stage, fill_parity);
              mbarrier_wait(full + landed_stage, landed_parity);
              landed_stage = landed_stage + 1;
              if (landed_stage == 12) {
                landed_stage = 0;
                landed_parity = landed_parity ^ 1;
              }
              uint64_t* barrier = full + fill_stage;
              uint8_t* destination = arena + fill_stage * 16384;
              mbarrier_arrive_expect_tx(barrier, 16384);
              bulk_copy(destination, source, 16384, barrier);
              fill_stage = fill_stage + 1;
              if (fill_stage == 12) {
                fill_stage = 0;
                fill_parity = fill_parity ^ 1;
              }
            }
          }
        }
      }
    }
  } else {
    // the math warps
    uint32_t turn = 0;
    uint32_t finisher = 0;
    uint32_t plan_index = 0;
    uint32_t use_stage = 0;
    uint32_t use_parity = 0;
    for (uint32_t step = 0; step < steps; ++step) {
      uint32_t following = plan_index + 1;
      if (following < plan_count) {
        uint32_t first_step = load_constant_u32(kv_plans + following * 2880);
        if (first_step <= step) {
          plan_index = following;
        }
      }
      uint32_t position = length + step;
      uint32_t step_epoch = epoch + step * 17;
      float* angles = (float*)(arena + 214368);
      #pragma unroll 1
      for (uint32_t number = thread; number < 64; number += 256) {
        angles[number] = rope[(uint64_t)(position) * 64 + (uint64_t)(number)];
      }
      float* residual = (float*)(arena + 214272);
      const bf16* embedded = embedding + (uint64_t)(next_token[0]) * 2048;
      #pragma unroll 1
      for (uint32_t place = thread; place < 16; place += 256) {
        uint32_t row = (place / 16 * 132 + block % 132) * 16 + place % 16;
        if (row < 2048) {
          residual[place] = bf16_to_f32(embedded[row]);
        } else {
          residual[place] = 0.0f;
        }
      }
      for (uint32_t layer = 0; layer < 16; ++layer) {
        uint32_t layer_epoch = step_epoch + layer;
        // qkv: input norm, q, k and v of this token, rotary embedding
        if (thread == 0) {
          store_relaxed_u32(progress + block, step * 82 + layer * 5);
        }
        const uint8_t* lines = (const uint8_t*)(norms + (layer * 2 + 1) * 2048);
        if (thread == 0) {
          #pragma unroll 1
          for (uint32_t offset = block * 128; offset < 4096; offset += 16896) {
            prefetch_l2(lines + offset);
          }
        }
        float scale = 0.0f;
        if ((block + 4) % 132 < 192) {
          if (layer == 0) {
            uint4* vector = (uint4*)(arena + 196864);
            float* partial_sums = (float*)(arena + 214336);
            float squares = 0.0f;
            uint32_t first_unit = thread;
            uint4 units[8];
            uint4 weights_2[8];
            #pragma unroll
            for (uint32_t number = 0; number < 1; ++number) {
              uint4 value = load_constant_u32x4(norms + (first_unit + number * 256) * 8);
              weights_2[number] = value;
            }
            #pragma unroll
            for (uint32_t number = 0; number < 1; ++number) {
              uint4 value = load_constant_u32x4(embedding + (uint64_t)(next_token[0]) * 2048 + (first_unit + number * 256) * 8);
              units[number] = value;
            }
            #pragma unroll
            for (uint32_t number = 0; number < 1; ++number) {
              float low = bf16x2_low(units[number].x);
              float high = bf16x2_high(units[number].x);
              squares = squares + (low * low + high * high);
              uint32_t weights_3 = weights_2[number].x;
              float low_2 = bf16x2_low(units[number].y);
              float high_2 = bf16x2_high(units[number].y);
              squares = squares + (low_2 * low_2 + high_2 * high_2);
              uint32_t weights_4 = weights_2[number].y;
              float low_3 = bf16x2_low(units[number].z);
              float high_3 = bf16x2_high(units[number].z);
              squares = squares + (low_3 * low_3 + high_3 * high_3);
              uint32_t weights_5 = weights_2[number].z;
              float low_4 = bf16x2_low(units[number].w);
              float high_4 = bf16x2_high(units[number].w);
              squares = squares + (low_4 * low_4 + high_4 * high_4);
              uint32_t weights_6 = weights_2[number].w;
              vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_3), high * bf16x2_high(weights_3)), pack_bf16x2(low_2 * bf16x2_low(weights_4), high_2 * bf16x2_high(weights_4)), pack_bf16x2(low_3 * bf16x2_low(weights_5), high_3 * bf16x2_high(weights_5)), pack_bf16x2(low_4 * bf16x2_low(weights_6), high_4 * bf16x2_high(weights_6)));
            }
            float warp_squares = warp_sum_f32(squares);
            if (lane == 0) {
              partial_sums[warp] = warp_squares;
            }
            named_barrier(1, 256);
            float total = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 8; ++other) {
              total = total + partial_sums[other];
            }
            float scale_2 = rsqrt_f32(total * 0.00048828125f + 1e-05f);
            scale = scale_2;
          } else {
            uint4* vector = (uint4*)(arena + 196864);
            float* partial_sums = (float*)(arena + 214336);
            float squares = 0.0f;
            uint32_t first_unit = thread;
            uint4 units[8];
            uint4 weights_2[8];
            #pragma unroll
            for (uint32_t number = 0; number < 1; ++number) {
              uint4 value = load_constant_u32x4(norms + layer * 2 * 2048 + (first_unit + number * 256) * 8);
              weights_2[number] = value;
            }
            if (lane == 0) {
              uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 32), layer_epoch - 1);
            }
            warp_barrier();
            wait_flagged_units(units, exchange_words + (first_unit * 4 + 32), 1024, 1, layer_epoch - 1);
            #pragma unroll
            for (uint32_t number = 0; number < 1; ++number) {
              float low = bf16x2_low(units[number].x);
              float high = bf16x2_high(units[number].x);
              squares = squares + (low * low + high * high);
              uint32_t weights_3 = weights_2[number].x;
              float low_2 = bf16x2_low(units[number].y);
              float high_2 = bf16x2_high(units[number].y);
              squares = squares + (low_2 * low_2 + high_2 * high_2);
              uint32_t weights_4 = weights_2[number].y;
              float low_3 = bf16x2_low(units[number].z);
              float high_3 = bf16x2_high(units[number].z);
              squares = squares + (low_3 * low_3 + high_3 * high_3);
              uint32_t weights_5 = weights_2[number].z;
              float low_4 = bf16x2_low(units[number].w);
              float high_4 = bf16x2_high(units[number].w);
              squares = squares + (low_4 * low_4 + high_4 * high_4);
              uint32_t weights_6 = weights_2[number].w;
              vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_3), high * bf16x2_high(weights_3)), pack_bf16x2(low_2 * bf16x2_low(weights_4), high_2 * bf16x2_high(weights_4)), pack_bf16x2(low_3 * bf16x2_low(weights_5), high_3 * bf16x2_high(weights_5)), pack_bf16x2(low_4 * bf16x2_low(weights_6), high_4 * bf16x2_high(weights_6)));
            }
            float warp_squares = warp_sum_f32(squares);
            if (lane == 0) {
              partial_sums[warp] = warp_squares;
            }
            named_barrier(1, 256);
            float total = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 8; ++other) {
              total = total + partial_sums[other];
            }
            float scale_2 = rsqrt_f32(total * 0.00048828125f + 1e-05f);
            scale = scale_2;
          }
        }
        uint32_t position_2 = (block + 4) % 132;
        #pragma unroll 1
        for (uint32_t strip = position_2; strip < 192; strip += 132) {
          float sums[4] = {};
          #pragma unroll 2
          for (uint32_t chunk = 0; chunk < 4; ++chunk) {
            mbarrier_wait(full + use_stage, use_parity);
            uint8_t* chunk_2 = arena + use_stage * 16384;
            uint4* vector = (uint4*)(arena + 196864);
            const uint4* fragments = (const uint4*)(chunk_2);
            #pragma unroll
            for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
              uint32_t pair = turn_2 * 8 + warp;
              uint4 first = fragments[pair * 64 + lane];
              uint4 second = fragments[pair * 64 + 32 + lane];
              uint4 values = vector[(chunk * 16 + pair) * 4 + lane % 4];
              mma_bf16(sums, first, values.x, values.y);
              mma_bf16(sums, second, values.z, values.w);
            }
            warp_barrier();
            if (lane == 0) {
              mbarrier_arrive(empty + use_stage);
            }
            use_stage = use_stage + 1;
            if (use_stage == 12) {
              use_stage = 0;
              use_parity = use_parity ^ 1;
            }
          }
          float* reductions = (float*)(arena + 213248) + turn * 128;
          if (lane % 4 == 0) {
            reductions[warp * 16 + lane / 4] = sums[0];
            reductions[warp * 16 + lane / 4 + 8] = sums[2];
          }
          named_barrier(1, 256);
          if (warp == finisher) {
            uint32_t row = lane % 16;
            uint32_t half = lane / 16;
            float half_sum = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 4; ++other) {
              half_sum = half_sum + reductions[(half * 4 + other) * 16 + row];
            }
            float value = shuffle_xor_f32(half_sum, 16);
            float row_sum = half_sum + value;
            uint32_t head = strip / 4;
            uint32_t strip_of_head = strip % 4;
            float value_2 = row_sum * scale;
            uint32_t dim = strip_of_head * 16 + row;
            if (head < 40) {
              float2* angles_2 = (float2*)(arena + 214368);
              uint32_t frequency = strip_of_head * 8 + row % 8;
              float2 angle = angles_2[frequency];
              float partner = shuffle_xor_f32(value_2, 8);
              bool is_second = row >= 8;
              float rotated = value_2 * angle.x + (is_second ? partner : -partner) * angle.y;
              uint32_t dim_2 = frequency + (is_second ? 32u : 0u);
              value_2 = rotated;
              dim = dim_2;
            }
            float neighbour = shuffle_xor_f32(value_2, 1);
            uint32_t pair = pack_bf16x2(value_2, neighbour);
            if (lane < 16 && lane % 2 == 0) {
              publish_flagged(exchange_words + ((head * 64 + dim) / 2 + 1056), pair, layer_epoch);
              if (head >= 32) {
                uint32_t page = load_constant_u32(page_table + position / 16);
                uint64_t offset = (uint64_t)(layer) * 8388608 + (uint64_t)(page) * 16384;
                bf16* key = kv + (offset + (uint64_t)((head - 32) % 8 * 1024 + position % 16 * 64));
                bf16* place = head - 32 < 8 ? key : key + 8192;
                ((uint32_t*)(place + dim))[0] = pair;
                fence_proxy_async();
              }
            }
          }
          turn = turn ^ 1;
          finisher = finisher + 1;
          if (finisher == 8) {
            finisher = 0;
          }
        }
        // attention
        if (thread == 0) {
          store_relaxed_u32(progress + block, step * 82 + (layer * 5 + 1));
        }
        uint32_t first_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 64)));
        uint32_t last_item = load_constant_u32(kv_plans + (plan_index * 2880 + (block + 1 + 64)));
        #pragma unroll 1
        for (uint32_t item = first_item; item < last_item; ++item) {
          uint32_t head = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 2 + 256)));
          uint32_t begin = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 3 + 256)));
          uint32_t end = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 4 + 256)));
          uint32_t slot = load_constant_u32(kv_plans + (plan_index * 2880 + (item * 8 + 5 + 256)));
          uint32_t cached_end = end < position ? end : position;
          bool has_newest = begin <= position && position < end;
          uint4* queries = (uint4*)(arena + 214624);
          uint32_t wanted = has_newest ? 48u : 32u;
          #pragma unroll 1
          for (uint32_t unit = thread; unit < wanted; unit += 256) {
            uint32_t source = head * 32 + unit;
            if (unit >= 40) {
              source = (40 + head) * 8 + (unit - 32 - 8);
            } else if (unit >= 32) {
              source = (32 + head) * 8 + (unit - 32);
            }
            uint4 value = wait_flagged4(exchange_words + (source * 4 + 1056), layer_epoch);
            queries[unit] = value;
          }
          named_barrier(1, 256);
          float highest[2];
          float weight_sum[2] = {};
          float output[4][4] = {};
          highest[0] = -bits_float(0x7f800000);
          highest[1] = -bits_float(0x7f800000);
          uint32_t next_tile = warp;
          #pragma unroll 1
          for (uint32_t first = begin; first < cached_end; first += 64) {
            uint32_t count = cached_end - first < 64 ? cached_end - first : 64;
            mbarrier_wait(full + use_stage, use_parity);
            uint8_t* chunk = arena + use_stage * 16384;
            while (next_tile * 16 < count) {
              uint32_t first_key = next_tile * 16;
              const uint4* keys = (const uint4*)(chunk);
              const uint4* queries_2 = (const uint4*)((uint4*)(arena + 214624));
              uint32_t key_row = lane / 4;
              uint32_t query_row = key_row < 3 ? key_row : 3;
              float logits_2[4] = {};
              #pragma unroll 2
              for (uint32_t part = 0; part < 2; ++part) {
                uint32_t column = part * 4 + lane % 4;
                uint4 low = keys[(first_key + key_row) * 8 + column];
                uint4 high = keys[(first_key + key_row + 8) * 8 + column];
                uint4 query = queries_2[query_row * 8 + column];
                mma_bf16(logits_2, make_u32x4(low.x, high.x, low.y, high.y), query.x, query.y);
                mma_bf16(logits_2, make_u32x4(low.z, high.z, low.w, high.w), query.z, query.w);
              }
              #pragma unroll
              for (uint32_t element = 0; element < 4; ++element) {
                bool exists = key_row + element / 2 * 8 < count - first_key;
                logits_2[element] = exists ? logits_2[element] * 0.18033688f : -bits_float(0x7f800000);
              }
              #pragma unroll
              for (uint32_t column = 0; column < 2; ++column) {
                float peak = maximum_f32(logits_2[column], logits_2[column + 2]);
                float value = shuffle_xor_f32(peak, 4);
                peak = maximum_f32(peak, value);
                float value_2 = shuffle_xor_f32(peak, 8);
                peak = maximum_f32(peak, value_2);
                float value_3 = shuffle_xor_f32(peak, 16);
                peak = maximum_f32(peak, value_3);
                float new_highest = maximum_f32(highest[column], peak);
                float shrink = exp2_f32(highest[column] - new_highest);
                highest[column] = new_highest;
                logits_2[column] = exp2_f32(logits_2[column] - new_highest);
                logits_2[column + 2] = exp2_f32(logits_2[column + 2] - new_highest);
                weight_sum[column] = weight_sum[column] * shrink + (logits_2[column] + logits_2[column + 2]);
                #pragma unroll
                for (uint32_t tile = 0; tile < 4; ++tile) {
                  output[tile][column] = output[tile][column] * shrink;
                  output[tile][column + 2] = output[tile][column + 2] * shrink;
                }
              }
              uint32_t weights_low = matrix_transpose_b16(pack_bf16x2(logits_2[0], logits_2[1]));
              uint32_t weights_high = matrix_transpose_b16(pack_bf16x2(logits_2[2], logits_2[3]));
              const uint4* values = (const uint4*)(chunk + 8192);
              uint32_t first_row = lane % 4 * 2;
              #pragma unroll
              for (uint32_t slice_ = 0; slice_ < 1; ++slice_) {
                uint32_t words[4][4];
                #pragma unroll
                for (uint32_t number = 0; number < 4; ++number) {
                  uint32_t key = first_row + number % 2 + number / 2 * 8;
                  uint4 read = values[(first_key + key) * 8 + slice_ * 8 + lane / 4];
                  bool exists = key < count - first_key;
                  words[number][0] = exists ? read.x : 0;
                  words[number][1] = exists ? read.y : 0;
                  words[number][2] = exists ? read.z : 0;
                  words[number][3] = exists ? read.w : 0;
                }
                #pragma unroll
                for (uint32_t tile = 0; tile < 4; ++tile) {
                  uint32_t low_early = byte_permute(words[0][tile / 2], words[1][tile / 2], tile % 2 == 0 ? 21520u : 30258u);
                  uint32_t high_early = byte_permute(words[0][(tile + 4) / 2], words[1][(tile + 4) / 2], (tile + 4) % 2 == 0 ? 21520u : 30258u);
                  uint32_t low_late = byte_permute(words[2][tile / 2], words[3][tile / 2], tile % 2 == 0 ? 21520u : 30258u);
                  uint32_t high_late = byte_permute(words[2][(tile + 4) / 2], words[3][(tile + 4) / 2], (tile + 4) % 2 == 0 ? 21520u : 30258u);
                  uint4 operand = make_u32x4(low_early, high_early, low_late, high_late);
                  mma_bf16(output[slice_ * 4 + tile], operand, weights_low, weights_high);
                }
              }
              next_tile = next_tile + 8;
            }
            next_tile = next_tile - 4;
            warp_barrier();
            if (lane == 0) {
              mbarrier_arrive(empty + use_stage);
            }
            use_stage = use_stage + 1;
            if (use_stage == 12) {
              use_stage = 0;
              use_parity = use_parity ^ 1;
            }
          }
          float2* statistics = (float2*)(arena + 215392);
          float* words = (float*)(statistics);
          #pragma unroll
          for (uint32_t column = 0; column < 2; ++column) {
            float total = weight_sum[column];
            float value = shuffle_xor_f32(total, 4);
            total = total + value;
            float value_2 = shuffle_xor_f32(total, 8);
            total = total + value_2;
            float value_3 = shuffle_xor_f32(total, 16);
            total = total + value_3;
            if (lane < 4) {
              uint32_t place = (warp * 8 + lane * 2 + column) * 2;
              words[place] = highest[column];
              words[place + 1] = total;
            }
          }
          const uint32_t* queries_2 = (const uint32_t*)((uint32_t*)(arena + 214624));
          float* statistics_2 = (float*)(arena + 215392);
          #pragma unroll 1
          for (uint32_t row = warp; row < 4; row += 8) {
            float product = 0.0f;
            if (has_newest) {
              #pragma unroll
              for (uint32_t word = lane; word < 32; word += 32) {
                uint32_t a = queries_2[row * 32 + word];
                uint32_t b = queries_2[128 + word];
                product = product + (bf16x2_low(a) * bf16x2_low(b) + bf16x2_high(a) * bf16x2_high(b));
              }
            }
            float value = warp_sum_f32(product);
            float logit = value * 0.18033688f;
            if (lane == 0) {
              uint32_t place = (64 + row) * 2;
              statistics_2[place] = has_newest ? logit : -bits_float(0x7f800000);
              statistics_2[place + 1] = has_newest ? 1.0f : 0.0f;
            }
          }
          float* scratch = (float*)(arena + 196864);
          #pragma unroll
          for (uint32_t column = 0; column < 2; ++column) {
            uint32_t row = lane % 4 * 2 + column;
            if (row < 4) {
              float* lane_dims = scratch + ((warp * 4 + row) * 64 + lane / 4 * 8);
              #pragma unroll
              for (uint32_t tile = 0; tile < 4; ++tile) {
                lane_dims[tile] = output[tile][column];
                lane_dims[tile + 4] = output[tile][column + 2];
              }
            }
          }
          named_barrier(1, 256);
          float2* scratch_2 = (float2*)(arena + 196864);
          float2* statistics_3 = (float2*)(arena + 215392);
          uint32_t* values = (uint32_t*)(arena + 214624) + 160;
          #pragma unroll 1
          for (uint32_t output_2 = thread; output_2 < 128; output_2 += 256) {
            uint32_t row = output_2 / 32;
            uint32_t pair = output_2 % 32;
            float highest_2 = -bits_float(0x7f800000);
            for (uint32_t other = 0; other < 9; ++other) {
              highest_2 = maximum_f32(highest_2, statistics_3[other * 8 + row].x);
            }
            float base = highest_2 == -bits_float(0x7f800000) ? 0.0f : highest_2;
            float weight_sum_2 = 0.0f;
            float low = 0.0f;
            float high = 0.0f;
            for (uint32_t other = 0; other < 8; ++other) {
              float2 numbers = statistics_3[other * 8 + row];
              float weight = exp2_f32(numbers.x - base);
              float2 part = scratch_2[(other * 4 + row) * 32 + pair];
              weight_sum_2 = weight_sum_2 + weight * numbers.y;
              low = low + weight * part.x;
              high = high + weight * part.y;
            }
            if (has_newest) {
              float weight = exp2_f32(statistics_3[64 + row].x - base);
              uint32_t value = values[pair];
              weight_sum_2 = weight_sum_2 + weight;
              low = low + weight * bf16x2_low(value);
              high = high + weight * bf16x2_high(value);
            }
            float inverse = weight_sum_2 == 0.0f ? 0.0f : divide_f32(1.0f, weight_sum_2);
            float lse = weight_sum_2 == 0.0f ? -bits_float(0x7f800000) : highest_2 * 0.6931472f + log_f32(weight_sum_2);
            if (slot == 4294967295u) {
              uint32_t place = (head * 4 + row) * 32 + pair;
              publish_flagged(exchange_words + (place + 74400), pack_bf16x2(low * inverse, high * inverse), layer_epoch);
            } else {
              uint32_t partial = (slot * 4 + row) * 68;
              publish_flagged(exchange_words + (partial + pair * 2 + 2592), float_bits(low * inverse), layer_epoch);
              publish_flagged(exchange_words + (partial + pair * 2 + 1 + 2592), float_bits(high * inverse), layer_epoch);
              if (pair < 4) {
                publish_flagged(exchange_words + (partial + 64 + pair + 2592), float_bits(lse), layer_epoch);
              }
            }
          }
          named_barrier(1, 256);
        }
        // merge of partial states
        uint32_t merge_count = load_constant_u32(kv_plans + (plan_index * 2880 + 2));
        #pragma unroll 1
        for (uint32_t job = block; job < merge_count * 4; job += 132) {
          uint32_t merge = job / 4;
          uint32_t row = job % 4;
          uint32_t head = load_constant_u32(kv_plans + (plan_index * 2880 + (merge * 2 + 1 + 2496)));
          uint32_t first_source = load_constant_u32(kv_plans + (plan_index * 2880 + (merge + 2432)));
          uint32_t last_source = load_constant_u32(kv_plans + (plan_index * 2880 + (merge + 1 + 2432)));
          float2* scratch = (float2*)(arena + 196864);
          float* lses = (float*)(arena + 215392);
          float highest = -bits_float(0x7f800000);
          float weight_sum = 0.0f;
          float low = 0.0f;
          float high = 0.0f;
          #pragma unroll 1
          for (uint32_t first = first_source; first < last_source; first += 8) {
            uint32_t count = last_source - first < 8 ? last_source - first : 8;
            uint4* scratch_2 = (uint4*)(arena + 196864);
            uint32_t* lses_2 = (uint32_t*)(arena + 215392);
            if (warp < count) {
              uint32_t slot = load_constant_u32(kv_plans + (plan_index * 2880 + (first + warp + 2560)));
              uint32_t partial_unit = (slot * 4 + row) * 17;
              if (lane < 16) {
                uint4 value = wait_flagged4(exchange_words + ((partial_unit + lane) * 4 + 2592), layer_epoch);
                scratch_2[warp * 16 + lane] = value;
              }
              if (lane == 0) {
                uint4 lse_words = wait_flagged4(exchange_words + ((partial_unit + 16) * 4 + 2592), layer_epoch);
                lses_2[warp] = lse_words.x;
              }
            }
            named_barrier(1, 256);
            if (thread < 32) {
              for (uint32_t other = 0; other < count; ++other) {
                float lse = lses[other];
                float new_highest = maximum_f32(highest, lse);
                float base = new_highest == -bits_float(0x7f800000) ? 0.0f : new_highest;
                float shrink = exp2_f32((highest - base) * 1.442695f);
                float weight = exp2_f32((lse - base) * 1.442695f);
                float2 part = scratch[other * 32 + thread];
                highest = new_highest;
                weight_sum = weight_sum * shrink + weight;
                low = low * shrink + weight * part.x;
                high = high * shrink + weight * part.y;
              }
            }
            named_barrier(1, 256);
          }
          if (thread < 32) {
            float inverse = weight_sum == 0.0f ? 0.0f : divide_f32(1.0f, weight_sum);
            uint32_t place = (head * 4 + row) * 32 + thread;
            publish_flagged(exchange_words + (place + 74400), pack_bf16x2(low * inverse, high * inverse), layer_epoch);
          }
        }
        // o: projection onto the residual
        if (thread == 0) {
          store_relaxed_u32(progress + block, step * 82 + (layer * 5 + 2));
        }
        if (block % 132 < 128) {
          uint4* vector = (uint4*)(arena + 196864);
          uint32_t first_unit = thread;
          uint4 units[8];
          if (lane == 0) {
            uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 74400), layer_epoch);
          }
          warp_barrier();
          wait_flagged_units(units, exchange_words + (first_unit * 4 + 74400), 1024, 1, layer_epoch);
          #pragma unroll
          for (uint32_t number = 0; number < 1; ++number) {
            vector[first_unit + number * 256] = units[number];
          }
          named_barrier(1, 256);
        }
        uint32_t position_3 = block % 132;
        #pragma unroll 1
        for (uint32_t strip = position_3; strip < 128; strip += 132) {
          float sums[4] = {};
          #pragma unroll 2
          for (uint32_t chunk = 0; chunk < 4; ++chunk) {
            mbarrier_wait(full + use_stage, use_parity);
            uint8_t* chunk_2 = arena + use_stage * 16384;
            uint4* vector = (uint4*)(arena + 196864);
            const uint4* fragments = (const uint4*)(chunk_2);
            #pragma unroll
            for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
              uint32_t pair = turn_2 * 8 + warp;
              uint4 first = fragments[pair * 64 + lane];
              uint4 second = fragments[pair * 64 + 32 + lane];
              uint4 values = vector[(chunk * 16 + pair) * 4 + lane % 4];
              mma_bf16(sums, first, values.x, values.y);
              mma_bf16(sums, second, values.z, values.w);
            }
            warp_barrier();
            if (lane == 0) {
              mbarrier_arrive(empty + use_stage);
            }
            use_stage = use_stage + 1;
            if (use_stage == 12) {
              use_stage = 0;
              use_parity = use_parity ^ 1;
            }
          }
          float* reductions = (float*)(arena + 213248) + turn * 128;
          if (lane % 4 == 0) {
            reductions[warp * 16 + lane / 4] = sums[0];
            reductions[warp * 16 + lane / 4 + 8] = sums[2];
          }
          named_barrier(1, 256);
          if (warp == finisher) {
            uint32_t row = lane % 16;
            uint32_t half = lane / 16;
            float half_sum = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 4; ++other) {
              half_sum = half_sum + reductions[(half * 4 + other) * 16 + row];
            }
            float value = shuffle_xor_f32(half_sum, 16);
            float row_sum = half_sum + value;
            float* residual_2 = (float*)(arena + 214272);
            float value_2 = row_sum;
            if (lane < 16) {
              uint32_t place = strip / 132 * 16 + row;
              value_2 = value_2 + residual_2[place];
              residual_2[place] = value_2;
            }
            float neighbour = shuffle_xor_f32(value_2, 1);
            uint32_t pair = pack_bf16x2(value_2, neighbour);
            if (lane < 16 && lane % 2 == 0) {
              publish_flagged(exchange_words + ((strip * 16 + lane) / 2 + 75424), pair, layer_epoch);
            }
          }
          turn = turn ^ 1;
          finisher = finisher + 1;
          if (finisher == 8) {
            finisher = 0;
          }
        }
        // gate_up: norm, gate and up, SwiGLU
        if (thread == 0) {
          store_relaxed_u32(progress + block, step * 82 + (layer * 5 + 3));
        }
        const uint8_t* lines_2 = (const uint8_t*)(norms + (layer * 2 + 2) * 2048);
        if (thread == 0) {
          #pragma unroll 1
          for (uint32_t offset = block * 128; offset < 4096; offset += 16896) {
            prefetch_l2(lines_2 + offset);
          }
        }
        float scale_2 = 0.0f;
        if ((block + 4) % 132 < 1024) {
          uint4* vector = (uint4*)(arena + 196864);
          float* partial_sums = (float*)(arena + 214336);
          float squares = 0.0f;
          uint32_t first_unit = thread;
          uint4 units[8];
          uint4 weights_2[8];
          #pragma unroll
          for (uint32_t number = 0; number < 1; ++number) {
            uint4 value = load_constant_u32x4(norms + (layer * 2 + 1) * 2048 + (first_unit + number * 256) * 8);
            weights_2[number] = value;
          }
          if (lane == 0) {
            uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 75424), layer_epoch);
          }
          warp_barrier();
          wait_flagged_units(units, exchange_words + (first_unit * 4 + 75424), 1024, 1, layer_epoch);
          #pragma unroll
          for (uint32_t number = 0; number < 1; ++number) {
            float low = bf16x2_low(units[number].x);
            float high = bf16x2_high(units[number].x);
            squares = squares + (low * low + high * high);
            uint32_t weights_3 = weights_2[number].x;
            float low_2 = bf16x2_low(units[number].y);
            float high_2 = bf16x2_high(units[number].y);
            squares = squares + (low_2 * low_2 + high_2 * high_2);
            uint32_t weights_4 = weights_2[number].y;
            float low_3 = bf16x2_low(units[number].z);
            float high_3 = bf16x2_high(units[number].z);
            squares = squares + (low_3 * low_3 + high_3 * high_3);
            uint32_t weights_5 = weights_2[number].z;
            float low_4 = bf16x2_low(units[number].w);
            float high_4 = bf16x2_high(units[number].w);
            squares = squares + (low_4 * low_4 + high_4 * high_4);
            uint32_t weights_6 = weights_2[number].w;
            vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_3), high * bf16x2_high(weights_3)), pack_bf16x2(low_2 * bf16x2_low(weights_4), high_2 * bf16x2_high(weights_4)), pack_bf16x2(low_3 * bf16x2_low(weights_5), high_3 * bf16x2_high(weights_5)), pack_bf16x2(low_4 * bf16x2_low(weights_6), high_4 * bf16x2_high(weights_6)));
          }
          float warp_squares = warp_sum_f32(squares);
          if (lane == 0) {
            partial_sums[warp] = warp_squares;
          }
          named_barrier(1, 256);
          float total = 0.0f;
          #pragma unroll
          for (uint32_t other = 0; other < 8; ++other) {
            total = total + partial_sums[other];
          }
          float scale_3 = rsqrt_f32(total * 0.00048828125f + 1e-05f);
          scale_2 = scale_3;
        }
        uint32_t position_4 = (block + 4) % 132;
        #pragma unroll 1
        for (uint32_t strip = position_4; strip < 1024; strip += 132) {
          float sums[4] = {};
          #pragma unroll 2
          for (uint32_t chunk = 0; chunk < 4; ++chunk) {
            mbarrier_wait(full + use_stage, use_parity);
            uint8_t* chunk_2 = arena + use_stage * 16384;
            uint4* vector = (uint4*)(arena + 196864);
            const uint4* fragments = (const uint4*)(chunk_2);
            #pragma unroll
            for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
              uint32_t pair = turn_2 * 8 + warp;
              uint4 first = fragments[pair * 64 + lane];
              uint4 second = fragments[pair * 64 + 32 + lane];
              uint4 values = vector[(chunk * 16 + pair) * 4 + lane % 4];
              mma_bf16(sums, first, values.x, values.y);
              mma_bf16(sums, second, values.z, values.w);
            }
            warp_barrier();
            if (lane == 0) {
              mbarrier_arrive(empty + use_stage);
            }
            use_stage = use_stage + 1;
            if (use_stage == 12) {
              use_stage = 0;
              use_parity = use_parity ^ 1;
            }
          }
          float* reductions = (float*)(arena + 213248) + turn * 128;
          if (lane % 4 == 0) {
            reductions[warp * 16 + lane / 4] = sums[0];
            reductions[warp * 16 + lane / 4 + 8] = sums[2];
          }
          named_barrier(1, 256);
          if (warp == finisher) {
            uint32_t row = lane % 16;
            uint32_t half = lane / 16;
            float half_sum = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 4; ++other) {
              half_sum = half_sum + reductions[(half * 4 + other) * 16 + row];
            }
            float value = shuffle_xor_f32(half_sum, 16);
            float row_sum = half_sum + value;
            float value_2 = row_sum * scale_2;
            float other = shuffle_xor_f32(value_2, 8);
            float gated = divide_f32(value_2, 1.0f + exp_f32(-value_2)) * other;
            float neighbour = shuffle_xor_f32(gated, 1);
            uint32_t pair = pack_bf16x2(gated, neighbour);
            if (lane < 8 && lane % 2 == 0) {
              publish_flagged(exchange_words + ((strip * 8 + lane) / 2 + 76448), pair, layer_epoch);
            }
          }
          turn = turn ^ 1;
          finisher = finisher + 1;
          if (finisher == 8) {
            finisher = 0;
          }
        }
        // down: projection onto the residual
        if (thread == 0) {
          store_relaxed_u32(progress + block, step * 82 + (layer * 5 + 4));
        }
        if (block % 132 < 128) {
          uint4* vector = (uint4*)(arena + 196864);
          uint32_t first_unit = thread;
          uint4 units[8];
          if (lane == 0) {
            uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 76448), layer_epoch);
          }
          warp_barrier();
          wait_flagged_units(units, exchange_words + (first_unit * 4 + 76448), 1024, 4, layer_epoch);
          #pragma unroll
          for (uint32_t number = 0; number < 4; ++number) {
            vector[first_unit + number * 256] = units[number];
          }
          named_barrier(1, 256);
        }
        uint32_t position_5 = block % 132;
        #pragma unroll 1
        for (uint32_t strip = position_5; strip < 128; strip += 132) {
          float sums[4] = {};
          #pragma unroll 2
          for (uint32_t chunk = 0; chunk < 16; ++chunk) {
            mbarrier_wait(full + use_stage, use_parity);
            uint8_t* chunk_2 = arena + use_stage * 16384;
            uint4* vector = (uint4*)(arena + 196864);
            const uint4* fragments = (const uint4*)(chunk_2);
            #pragma unroll
            for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
              uint32_t pair = turn_2 * 8 + warp;
              uint4 first = fragments[pair * 64 + lane];
              uint4 second = fragments[pair * 64 + 32 + lane];
              uint4 values = vector[(chunk * 16 + pair) * 4 + lane % 4];
              mma_bf16(sums, first, values.x, values.y);
              mma_bf16(sums, second, values.z, values.w);
            }
            warp_barrier();
            if (lane == 0) {
              mbarrier_arrive(empty + use_stage);
            }
            use_stage = use_stage + 1;
            if (use_stage == 12) {
              use_stage = 0;
              use_parity = use_parity ^ 1;
            }
          }
          float* reductions = (float*)(arena + 213248) + turn * 128;
          if (lane % 4 == 0) {
            reductions[warp * 16 + lane / 4] = sums[0];
            reductions[warp * 16 + lane / 4 + 8] = sums[2];
          }
          named_barrier(1, 256);
          if (warp == finisher) {
            uint32_t row = lane % 16;
            uint32_t half = lane / 16;
            float half_sum = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 4; ++other) {
              half_sum = half_sum + reductions[(half * 4 + other) * 16 + row];
            }
            float value = shuffle_xor_f32(half_sum, 16);
            float row_sum = half_sum + value;
            float* residual_2 = (float*)(arena + 214272);
            float value_2 = row_sum;
            if (lane < 16) {
              uint32_t place = strip / 132 * 16 + row;
              value_2 = value_2 + residual_2[place];
              residual_2[place] = value_2;
            }
            float neighbour = shuffle_xor_f32(value_2, 1);
            uint32_t pair = pack_bf16x2(value_2, neighbour);
            if (lane < 16 && lane % 2 == 0) {
              publish_flagged(exchange_words + ((strip * 16 + lane) / 2 + 32), pair, layer_epoch);
            }
          }
          turn = turn ^ 1;
          finisher = finisher + 1;
          if (finisher == 8) {
            finisher = 0;
          }
        }
      }
      // head: final norm, logits, candidates
      if (thread == 0) {
        store_relaxed_u32(progress + block, step * 82 + 80);
      }
      float best = -bits_float(0x7f800000);
      uint32_t best_token = 4294967295u;
      if (step + 1 >= given || logits != nullptr) {
        float scale = 0.0f;
        if ((block + 4) % 132 < 8016) {
          uint32_t last = step_epoch + 15;
          uint4* vector = (uint4*)(arena + 196864);
          float* partial_sums = (float*)(arena + 214336);
          float squares = 0.0f;
          uint32_t first_unit = thread;
          uint4 units[8];
          uint4 weights_2[8];
          #pragma unroll
          for (uint32_t number = 0; number < 1; ++number) {
            uint4 value = load_constant_u32x4(norms + 65536 + (first_unit + number * 256) * 8);
            weights_2[number] = value;
          }
          if (lane == 0) {
            uint4 value = wait_flagged4(exchange_words + (first_unit * 4 + 32), last);
          }
          warp_barrier();
          wait_flagged_units(units, exchange_words + (first_unit * 4 + 32), 1024, 1, last);
          #pragma unroll
          for (uint32_t number = 0; number < 1; ++number) {
            float low = bf16x2_low(units[number].x);
            float high = bf16x2_high(units[number].x);
            squares = squares + (low * low + high * high);
            uint32_t weights_3 = weights_2[number].x;
            float low_2 = bf16x2_low(units[number].y);
            float high_2 = bf16x2_high(units[number].y);
            squares = squares + (low_2 * low_2 + high_2 * high_2);
            uint32_t weights_4 = weights_2[number].y;
            float low_3 = bf16x2_low(units[number].z);
            float high_3 = bf16x2_high(units[number].z);
            squares = squares + (low_3 * low_3 + high_3 * high_3);
            uint32_t weights_5 = weights_2[number].z;
            float low_4 = bf16x2_low(units[number].w);
            float high_4 = bf16x2_high(units[number].w);
            squares = squares + (low_4 * low_4 + high_4 * high_4);
            uint32_t weights_6 = weights_2[number].w;
            vector[first_unit + number * 256] = make_u32x4(pack_bf16x2(low * bf16x2_low(weights_3), high * bf16x2_high(weights_3)), pack_bf16x2(low_2 * bf16x2_low(weights_4), high_2 * bf16x2_high(weights_4)), pack_bf16x2(low_3 * bf16x2_low(weights_5), high_3 * bf16x2_high(weights_5)), pack_bf16x2(low_4 * bf16x2_low(weights_6), high_4 * bf16x2_high(weights_6)));
          }
          float warp_squares = warp_sum_f32(squares);
          if (lane == 0) {
            partial_sums[warp] = warp_squares;
          }
          named_barrier(1, 256);
          float total = 0.0f;
          #pragma unroll
          for (uint32_t other = 0; other < 8; ++other) {
            total = total + partial_sums[other];
          }
          float scale_2 = rsqrt_f32(total * 0.00048828125f + 1e-05f);
          scale = scale_2;
        }
        uint32_t position_2 = (block + 4) % 132;
        #pragma unroll 1
        for (uint32_t strip = position_2; strip < 8016; strip += 132) {
          float sums[4] = {};
          #pragma unroll 2
          for (uint32_t chunk = 0; chunk < 4; ++chunk) {
            mbarrier_wait(full + use_stage, use_parity);
            uint8_t* chunk_2 = arena + use_stage * 16384;
            uint4* vector = (uint4*)(arena + 196864);
            const uint4* fragments = (const uint4*)(chunk_2);
            #pragma unroll
            for (uint32_t turn_2 = 0; turn_2 < 2; ++turn_2) {
              uint32_t pair = turn_2 * 8 + warp;
              uint4 first = fragments[pair * 64 + lane];
              uint4 second = fragments[pair * 64 + 32 + lane];
              uint4 values = vector[(chunk * 16 + pair) * 4 + lane % 4];
              mma_bf16(sums, first, values.x, values.y);
              mma_bf16(sums, second, values.z, values.w);
            }
            warp_barrier();
            if (lane == 0) {
              mbarrier_arrive(empty + use_stage);
            }
            use_stage = use_stage + 1;
            if (use_stage == 12) {
              use_stage = 0;
              use_parity = use_parity ^ 1;
            }
          }
          float* reductions = (float*)(arena + 213248) + turn * 128;
          if (lane % 4 == 0) {
            reductions[warp * 16 + lane / 4] = sums[0];
            reductions[warp * 16 + lane / 4 + 8] = sums[2];
          }
          named_barrier(1, 256);
          if (warp == finisher) {
            uint32_t row = lane % 16;
            uint32_t half = lane / 16;
            float half_sum = 0.0f;
            #pragma unroll
            for (uint32_t other = 0; other < 4; ++other) {
              half_sum = half_sum + reductions[(half * 4 + other) * 16 + row];
            }
            float value = shuffle_xor_f32(half_sum, 16);
            float row_sum = half_sum + value;
            float logit = row_sum * scale;
            uint32_t token = strip * 16 + row;
            if (logits != nullptr && lane < 16 && token < 128256) {
              logits[(uint64_t)(step) * 128256 + (uint64_t)(token)] = logit;
            }
            uint32_t token_2 = strip * 16 + row;
            float candidate = logit;
            if (temperature > 0.0f) {
              uint32_t c0 = token_2;
              uint32_t c1 = position + 1;
              uint32_t c2 = 0;
              uint32_t c3 = 0;
              uint32_t k0 = (uint32_t)(seed);
              uint32_t k1 = (uint32_t)(seed >> 32);
              #pragma unroll
              for (uint32_t i = 0; i < 10; ++i) {
                uint32_t high0 = multiply_high_u32(3528531795u, c0);
                uint32_t high1 = multiply_high_u32(3449720151u, c2);
                uint32_t low0 = c0 * 3528531795u;
                uint32_t low1 = c2 * 3449720151u;
                c0 = high1 ^ c1 ^ k0;
                c1 = low1;
                c2 = high0 ^ c3 ^ k1;
                c3 = low0;
                k0 = k0 + 2654435769u;
                k1 = k1 + 3144134277u;
              }
              uint32_t word = c0;
              float uniform = ((float)(word >> 9) + 0.5f) * 1.1920929e-07f;
              float noise = -log_f32(-log_f32(uniform));
              candidate = divide_f32(logit, temperature) + noise;
            }
            if (token_2 < 128256 && candidate > best) {
              best = candidate;
              best_token = token_2;
            }
          }
          turn = turn ^ 1;
          finisher = finisher + 1;
          if (finisher == 8) {
            finisher = 0;
          }
        }
      }
      if (thread == 0) {
        store_relaxed_u32(progress + block, step * 82 + 81);
      }
      uint2* candidates = (uint2*)(arena + 215968);
      uint32_t first_unit = step % 2 * 132;
      #pragma unroll 1
      for (uint32_t level = 0; level < 5; ++level) {
        uint32_t mask = 16u >> level;
        float other = shuffle_xor_f32(best, mask);
        uint32_t other_token = shuffle_xor_u32(best_token, mask);
        if (other > best || (other == best && other_token < best_token)) {
          best = other;
          best_token = other_token;
        }
      }
      uint32_t* words = (uint32_t*)(candidates);
      if (lane == 0) {
        words[warp * 2] = float_bits(best);
        words[warp * 2 + 1] = best_token;
      }
      named_barrier(1, 256);
      if (warp == 0) {
        uint2* candidates_2 = (uint2*)(arena + 215968);
        best = -bits_float(0x7f800000);
        best_token = 4294967295u;
        #pragma unroll 1
        for (uint32_t other = lane; other < 8; other += 32) {
          uint2 candidate = candidates_2[other];
          if (bits_float(candidate.x) > best || (bits_float(candidate.x) == best && candidate.y < best_token)) {
            best = bits_float(candidate.x);
            best_token = candidate.y;
          }
        }
        #pragma unroll 1
        for (uint32_t level = 0; level < 5; ++level) {
          uint32_t mask = 16u >> level;
          float other = shuffle_xor_f32(best, mask);
          uint32_t other_token = shuffle_xor_u32(best_token, mask);
          if (other > best || (other == best && other_token < best_token)) {
            best = other;
            best_token = other_token;
          }
        }
        if (lane < 4) {
          uint32_t word = lane == 0 ? float_bits(best) : best_token;
          publish_flagged_release(exchange_words + ((first_unit + block) * 4 + lane + 80544), word, step_epoch + 16);
        }
      }
      named_barrier(1, 256);
      #pragma unroll 1
      for (uint32_t other = thread; other < 132; other += 256) {
        uint4 unit = wait_flagged4_acquire(exchange_words + ((first_unit + other) * 4 + 80544), step_epoch + 16);
        words[other * 2] = unit.x;
        words[other * 2 + 1] = unit.y;
      }
      named_barrier(1, 256);
      if (warp == 0) {
        uint2* candidates_2 = (uint2*)(arena + 215968);
        best = -bits_float(0x7f800000);
        best_token = 4294967295u;
        #pragma unroll 1
        for (uint32_t other = lane; other < 132; other += 32) {
          uint2 candidate = candidates_2[other];
          if (bits_float(candidate.x) > best || (bits_float(candidate.x) == best && candidate.y < best_token)) {
            best = bits_float(candidate.x);
            best_token = candidate.y;
          }
        }
        #pragma unroll 1
        for (uint32_t level = 0; level < 5; ++level) {
          uint32_t mask = 16u >> level;
          float other = shuffle_xor_f32(best, mask);
          uint32_t other_token = shuffle_xor_u32(best_token, mask);
          if (other > best || (other == best && other_token < best_token)) {
            best = other;
            best_token = other_token;
          }
        }
        if (lane == 0) {
          words[0] = best_token;
        }
      }
      // the next token, and whether it ends the sequence
      if (thread == 0) {
        uint32_t following_2 = step + 1;
        uint32_t token = 0;
        uint32_t stop = 0;
        if (following_2 < given) {
          token = (uint32_t)(tokens[following_2]);
        } else {
          token = ((uint32_t*)(arena + 215968))[0] < 128255 ? ((uint32_t*)(arena + 215968))[0] : 128255;
          #pragma unroll 1
          for (uint32_t number = 0; number < stop_count; ++number) {
            if ((uint32_t)(stop_ids[number]) == token) {
              stop = 1;
            }
          }
        }
        if (block == 0) {
          if (following_2 >= given) {
            tokens[following_2] = (int32_t)(token);
          }
          status[0] = (int32_t)(following_2);
        }
        mbarrier_wait(step_done + 1, (step + 1) % 2);
        next_token[0] = token;
        next_token[1] = stop;
        fence_proxy_async();
        mbarrier_arrive(step_done);
      }
      named_barrier(1, 256);
      if (next_token[1] != 0) {
        // the copy lane has fetched what it does not need the token for: use it up
        if (step + 1 < steps) {
          #pragma unroll 1
          for (uint32_t i = (block + 4) % 132; i < 192; i += 132) {
            #pragma unroll 1
            for (uint32_t i_2 = 0; i_2 < 4; ++i_2) {
              mbarrier_wait(full + use_stage, use_parity);
              uint8_t* chunk = arena + use_stage * 16384;
              warp_barrier();
              if (lane == 0) {
                mbarrier_arrive(empty + use_stage);
              }
              use_stage = use_stage + 1;
              if (use_stage == 12) {
                use_stage = 0;
                use_parity = use_parity ^ 1;
              }
            }
          }
        }
        break;
      }
    }
  }
}
