// CUDA's words, for kernels on the CPU: each block is a thread of the host, each of its threads a fiber of that.
//
// Enough for `kernels/cuda/`. Fibers go on in an order that changes from turn to turn, so that a missing barrier shows.

#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
  unsigned x;
};
static thread_local Index threadIdx, blockIdx, gridDim;

struct Barrier {
  unsigned arrived = 0, turn = 0;
};

struct Block {
  unsigned threads;
  std::vector<ucontext_t> fibers;
  std::vector<bool> ended;
  std::vector<unsigned> words;  // one of each thread, for the others of its warp
  std::vector<Barrier> warps;
  Barrier all;
  ucontext_t scheduler;
  std::function<void()> body;
};
static thread_local Block* block;

inline void wait_for(Barrier& barrier, unsigned threads) {
  unsigned turn = barrier.turn;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
  while (barrier.turn == turn) swapcontext(&block->fibers[threadIdx.x], &block->scheduler);
}

inline void __syncthreads() { wait_for(block->all, block->threads); }
inline void __syncwarp() { wait_for(block->warps[threadIdx.x / 32], 32); }

// What `read` makes of the words of this thread's warp.
template <class Read>
unsigned of_warp(unsigned word, Read read) {
  unsigned* words = block->words.data() + threadIdx.x / 32 * 32;
  words[threadIdx.x % 32] = word;
  __syncwarp();
  unsigned result = read(words, threadIdx.x % 32);
  __syncwarp();
  return result;
}

inline unsigned __match_any_sync(unsigned, unsigned word) {
  return of_warp(word, [](const unsigned* words, unsigned lane) {
    unsigned mask = 0;
    for (unsigned other = 0; other < 32; ++other) mask |= unsigned(words[other] == words[lane]) << other;
    return mask;
  });
}

inline unsigned __ballot_sync(unsigned, unsigned vote) {
  return of_warp(vote, [](const unsigned* words, unsigned) {
    unsigned mask = 0;
    for (unsigned other = 0; other < 32; ++other) mask |= unsigned(words[other] != 0) << other;
    return mask;
  });
}

inline unsigned __shfl_up_sync(unsigned, unsigned word, unsigned step) {
  return of_warp(word, [step](const unsigned* words, unsigned lane) { return words[lane < step ? lane : lane - step]; });
}

inline unsigned min(unsigned one, unsigned other) { return one < other ? one : other; }

inline unsigned __popc(unsigned word) { return unsigned(__builtin_popcount(word)); }

inline unsigned atomicAdd(unsigned* word, unsigned more) { return __atomic_fetch_add(word, more, __ATOMIC_SEQ_CST); }

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void __nanosleep(unsigned) { std::this_thread::yield(); }

template <class T>
T __ldcg(const T* at) {
  return *at;
}

inline void run_fiber() {
  block->body();
  block->ended[threadIdx.x] = true;
  swapcontext(&block->fibers[threadIdx.x], &block->scheduler);
}

inline void run_block(unsigned number, unsigned blocks, unsigned threads, std::function<void()> body) {
  constexpr unsigned STACK = 1 << 16;
  std::unique_ptr<char[]> stacks(new char[size_t(STACK) * threads]);
  Block now{threads, std::vector<ucontext_t>(threads), std::vector<bool>(threads), std::vector<unsigned>(threads),
            std::vector<Barrier>(threads / 32), {}, {}, body};
  block = &now;
  blockIdx.x = number;
  gridDim.x = blocks;
  for (unsigned t = 0; t < threads; ++t) {
    getcontext(&now.fibers[t]);
    now.fibers[t].uc_stack.ss_sp = stacks.get() + size_t(STACK) * t;
    now.fibers[t].uc_stack.ss_size = STACK;
    now.fibers[t].uc_link = &now.scheduler;
    makecontext(&now.fibers[t], run_fiber, 0);
  }
  for (unsigned left = threads, turn = 0; left > 0; ++turn) {
    for (unsigned n = 0; n < threads; ++n) {
      unsigned t = turn % 2 ? threads - 1 - n : (n * 37 + turn) % threads;
      if (now.ended[t]) continue;
      threadIdx.x = t;
      swapcontext(&now.scheduler, &now.fibers[t]);
      left -= now.ended[t];
    }
  }
}

// Runs `body` as a kernel, all blocks at once.
inline void run_blocks(unsigned blocks, unsigned threads, std::function<void()> body) {
  std::vector<std::thread> running;
  for (unsigned number = 0; number < blocks; ++number) running.emplace_back(run_block, number, blocks, threads, body);
  for (std::thread& one : running) one.join();
}
