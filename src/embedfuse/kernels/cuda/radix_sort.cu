// A stable sort of row numbers, and of what lies beside them, by the low bits of the row, least significant digit first.
//
// For each digit: how many keys of it each tile has, then how many the tiles before it have, then every key to its place.
// Of keys so few that all tiles run at once, `radix_sort_…` does all in one launch: its blocks wait for each other, which
// spares the host most of its time. Of more, three launches for each digit take the device less. Tiles could also wait
// for what those before them say ("Onesweep", Adinets and Merrill, 2022), but of a batch's ids nearly all tiles run at
// once, and what they then ask each other is more than the keys.
//
// Made with -DBITS=…, the bits of a digit. Rows are less than 2^31.

#ifndef THREADS
#define THREADS 256
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif

typedef unsigned int u32;
typedef unsigned short u16;

constexpr u32 BINS = 1u << BITS;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 OWN = (BINS + THREADS - 1) / THREADS;  // bins that one thread adds up
constexpr u32 SUMS = 4;                              // tiles that one thread adds up
constexpr u32 ALL = 0xffffffffu;                     // lanes of a warp; and the key behind the last one

// What other blocks wrote is read past the cache of this one's multiprocessor, which may hold what was there before.

__device__ inline u32 digit_of(u32 key, u32 shift) { return key >> shift & (BINS - 1); }

// Tells the other blocks that this one wrote what they read. `arrived` was 0 before the launch.
__device__ inline void arrive(u32* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
  }
}

// Waits until all blocks arrived `times` times.
__device__ inline void wait_for_all(u32* arrived, u32 times) {
  if (threadIdx.x == 0) {
    while (*(volatile u32*)arrived < times * gridDim.x) __nanosleep(32);
    __threadfence();
  }
  __syncthreads();
}

// The sum of `value` over the threads before this one, and `all` over all. All threads of a block come here; `sums` is
// theirs.
__device__ inline u32 sum_before(u32 value, u32* sums, u32* all) {
  u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, sum = value;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(ALL, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  u32 before = sum - value;
  *all = 0;
#pragma unroll
  for (u32 other = 0; other < WARPS; ++other) {
    if (other < warp) before += sums[other];
    *all += sums[other];
  }
  __syncthreads();
  return before;
}

template <u32 ITEMS>
struct Memory {
  u16 counts[WARPS * BINS];  // of each warp; then where its first key of a digit goes
  u32 places[BINS];          // of the first key of a digit among all, less its place in the tile
  u32 keys[THREADS * ITEMS], beside[THREADS * ITEMS];
  u32 sums[WARPS];
};

// A tile of keys: key `i` of a thread has its number `i * 32 + lane` in the warp's part of the tile.
template <u32 ITEMS>
struct Tile {
  u32 key[ITEMS];
  u32 rank[ITEMS];  // how many of the warp have its digit and come before it
  u32 inside;       // keys of the tile
  u32 first, last;  // key 0 of this thread; the last key of all
  u32 total[OWN], of_tiles[OWN];  // of the thread's bins: keys of all tiles, and of those before this one

  // Reads the keys and counts those of each digit, of each warp.
  __device__ inline void read(Memory<ITEMS>& m, const u32* keys, u32 number, u32 shift, u32 tile) {
    const u32 lane = threadIdx.x & 31, start = tile * THREADS * ITEMS;
    inside = number - start < THREADS * ITEMS ? number - start : THREADS * ITEMS;
    first = start + threadIdx.x / 32 * (32 * ITEMS) + lane;
    last = number - 1;
    for (u32 i = threadIdx.x; i < WARPS * BINS; i += THREADS) m.counts[i] = 0;
#pragma unroll
    for (u32 i = 0; i < ITEMS; ++i) {
      u32 at = first + i * 32, word = __ldcg(keys + min(at, last));
      // those behind the end have the last digit and are the last of it
      key[i] = at <= last ? word : ALL;
    }
    __syncthreads();
    u16* mine = m.counts + threadIdx.x / 32 * BINS;
#pragma unroll
    for (u32 i = 0; i < ITEMS; ++i) {
      u32 digit = digit_of(key[i], shift), peers = ALL;
#pragma unroll
      for (u32 bit = 0; bit < BITS; ++bit) {
        u32 set = digit >> bit & 1, votes = __ballot_sync(ALL, set);
        peers &= set ? votes : ~votes;
      }
      u32 lower = peers & ((1u << lane) - 1), earlier = mine[digit];
      rank[i] = earlier + __popc(lower);
      __syncwarp();
      if (lower == 0) mine[digit] = (u16)(earlier + __popc(peers));
      __syncwarp();
    }
    __syncthreads();
  }

  // Sorts the tile by the digit, in shared memory: the keys, and what lies beside them; their positions if null.
  __device__ inline void sort(Memory<ITEMS>& m, const u32* beside, u32 shift) {
    u32 count[OWN], of_tile = 0, all;
#pragma unroll
    for (u32 o = 0; o < OWN; ++o) {
      u32 bin = threadIdx.x * OWN + o;
      count[o] = bin < BINS ? count_of(m, bin) : 0;
      of_tile += count[o];
    }
    u32 start = sum_before(of_tile, m.sums, &all);
#pragma unroll
    for (u32 o = 0; o < OWN; ++o) {
      u32 bin = threadIdx.x * OWN + o, next = start;
      if (bin < BINS) {
        m.places[bin] = 0 - start;
        for (u32 w = 0; w < WARPS; ++w) {
          u32 of_warp = m.counts[w * BINS + bin];
          m.counts[w * BINS + bin] = (u16)next;
          next += of_warp;
        }
      }
      start += count[o];
    }
    __syncthreads();
    const u16* mine = m.counts + threadIdx.x / 32 * BINS;
#pragma unroll
    for (u32 i = 0; i < ITEMS; ++i) {
      rank[i] += mine[digit_of(key[i], shift)];
      m.keys[rank[i]] = key[i];
    }
#pragma unroll
    for (u32 i = 0; i < ITEMS; ++i) {
      u32 at = min(first + i * 32, last);
      m.beside[rank[i]] = beside == nullptr ? at : __ldcg(beside + at);
    }
    __syncthreads();
  }

  // Reads where the tile's keys go: `before` is what `sum_counts` made of counts[BINS][tiles].
  __device__ inline void look_up(const u32* before, const u32* totals, u32 tile, u32 tiles) {
#pragma unroll
    for (u32 o = 0; o < OWN; ++o) {
      u32 bin = threadIdx.x * OWN + o;
      total[o] = bin < BINS ? __ldcg(totals + bin) : 0;
      of_tiles[o] = bin < BINS ? __ldcg(before + bin * tiles + tile) : 0;
    }
  }

  // Writes the sorted tile to its places among all.
  __device__ inline void write(Memory<ITEMS>& m, u32* sorted_keys, u32* sorted_beside, u32 shift) const {
    u32 of_totals = 0, all;
#pragma unroll
    for (u32 o = 0; o < OWN; ++o) of_totals += total[o];
    u32 sum = sum_before(of_totals, m.sums, &all);
#pragma unroll
    for (u32 o = 0; o < OWN; ++o) {
      u32 bin = threadIdx.x * OWN + o;
      if (bin < BINS) m.places[bin] += sum + of_tiles[o];
      sum += total[o];
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < ITEMS; ++i) {
      u32 at = i * THREADS + threadIdx.x;
      if (at < inside) {
        u32 word = m.keys[at], to = m.places[digit_of(word, shift)] + at;
        sorted_keys[to] = word;
        sorted_beside[to] = m.beside[at];
      }
    }
  }

  // How many keys of the tile have a digit.
  static __device__ inline u32 count_of(const Memory<ITEMS>& m, u32 bin) {
    u32 count = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) count += m.counts[w * BINS + bin];
    return count;
  }
};

// Of one digit, how many keys the tiles before each tile have, in place of how many it has; and all have.
__device__ inline void sum_counts(u32* sums, u32* own, u32* total, u32 tiles) {
  u32 before = 0;
  for (u32 first = 0; first < tiles; first += THREADS * SUMS) {
    u32 count[SUMS], of_thread = 0, all;
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) {
      u32 tile = first + threadIdx.x * SUMS + i;
      count[i] = tile < tiles ? __ldcg(own + tile) : 0;
      of_thread += count[i];
    }
    u32 sum = before + sum_before(of_thread, sums, &all);
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) {
      u32 tile = first + threadIdx.x * SUMS + i;
      if (tile < tiles) own[tile] = sum;
      sum += count[i];
    }
    before += all;
  }
  if (threadIdx.x == 0) *total = before;
}

// Sorts by `passes` digits, in as many blocks as there are tiles. Where passes are even, the sorted keys lie at `keys`
// and `other_beside`, else at `other_keys` and `beside`.
//
// first: what lies beside the keys; their positions if null. counts: memory for [BINS][tiles]. totals: for [BINS].
// arrived: one word, 0.
template <u32 ITEMS>
__device__ inline void sort_by_digits(u32* keys, u32* other_keys, const u32* first, u32* beside, u32* other_beside,
                                      u32* counts, u32* totals, u32* arrived, u32 number, u32 passes) {
  __shared__ Memory<ITEMS> m;
  Tile<ITEMS> own;
  const u32 tile = blockIdx.x, tiles = gridDim.x;
  for (u32 pass = 0; pass < passes; ++pass) {
    const u32 shift = pass * BITS;
    if (pass != 0) wait_for_all(arrived, 3 * pass);
    own.read(m, pass % 2 ? other_keys : keys, number, shift, tile);
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin * tiles + tile] = own.count_of(m, bin);
    arrive(arrived);
    // meanwhile
    own.sort(m, pass == 0 ? first : pass % 2 ? beside : other_beside, shift);
    wait_for_all(arrived, 3 * pass + 1);
    for (u32 bin = tile; bin < BINS; bin += tiles) sum_counts(m.sums, counts + bin * tiles, totals + bin, tiles);
    arrive(arrived);
    wait_for_all(arrived, 3 * pass + 2);
    own.look_up(counts, totals, tile, tiles);
    own.write(m, pass % 2 ? keys : other_keys, pass % 2 ? other_beside : beside, shift);
    if (pass + 1 < passes) arrive(arrived);
  }
}

#define RADIX_SORT(ITEMS)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                        \
  radix_sort_##ITEMS(u32* keys, u32* other_keys, const u32* first, u32* beside, u32* other_beside, u32* counts,        \
                     u32* totals, u32* arrived, u32 number, u32 passes) {                                              \
    sort_by_digits<ITEMS>(keys, other_keys, first, beside, other_beside, counts, totals, arrived, number, passes);     \
  }

RADIX_SORT(4)
RADIX_SORT(8)

// The same in three launches for each digit; a block of the first and the last has one tile of MANY keys to a thread.

constexpr u32 MANY = 16;

extern "C" __global__ void __launch_bounds__(THREADS)
count_digits(const u32* keys, u32* counts, u32 number, u32 shift) {
  __shared__ u32 found[BINS];
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) found[bin] = 0;
  __syncthreads();
  u32 key[MANY];
#pragma unroll
  for (u32 i = 0; i < MANY; ++i) {
    u32 at = (blockIdx.x * MANY + i) * THREADS + threadIdx.x;
    key[i] = at < number ? keys[at] : ALL;
  }
#pragma unroll
  for (u32 i = 0; i < MANY; ++i) {
    if (key[i] != ALL) atomicAdd(&found[digit_of(key[i], shift)], 1u);
  }
  __syncthreads();
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin * gridDim.x + blockIdx.x] = found[bin];
}

// A block for each digit.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_digits(u32* counts, u32* totals, u32 tiles) {
  __shared__ u32 sums[WARPS];
  sum_counts(sums, counts + blockIdx.x * tiles, totals + blockIdx.x, tiles);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
sort_by_digit(const u32* keys, const u32* beside, u32* sorted_keys, u32* sorted_beside, const u32* before,
              const u32* totals, u32 number, u32 shift) {
  __shared__ Memory<MANY> m;
  Tile<MANY> own;
  own.look_up(before, totals, blockIdx.x, gridDim.x);
  own.read(m, keys, number, shift, blockIdx.x);
  own.sort(m, beside, shift);
  own.write(m, sorted_keys, sorted_beside, shift);
}
