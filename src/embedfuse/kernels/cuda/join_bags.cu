// The bags of several features, put behind each other:
//
//   ids[first[f] + i] = given.ids[f][i]
//   offsets[f * bags + b] = first[f] + given.offsets[f][b], or first[f] + b where each bag has one id; then all ids
//
// One launch, whose argument says where everything is, in place of PyTorch's three and of all that the host does for
// them. Made with -DMOST=…, the features of a launch, and -DBYTES=…, those of an id.

#ifndef THREADS
#define THREADS 256
#endif
#ifndef ITEMS
#define ITEMS 4
#endif

typedef long long i64;

#if BYTES == 4
typedef int Id;
#else
typedef i64 Id;
#endif

// as in bags.h
struct Given {
  const Id* ids[MOST];
  const i64* offsets[MOST];  // null: one id a bag
  i64 first[MOST + 1];       // and last the number of all ids
  i64 bags;
  int features, blocks;  // blocks that move ids; the others move offsets
};

// The feature of the id at `place`, from `feature` on.
__device__ inline int feature_of(const Given& given, i64 place, int feature) {
  int last = given.features - 1;
  while (feature < last) {
    int middle = (feature + last + 1) / 2;
    if (given.first[middle] <= place)
      feature = middle;
    else
      last = middle - 1;
  }
  return feature;
}

extern "C" __global__ void __launch_bounds__(THREADS)
join_bags(const __grid_constant__ Given given, Id* ids, i64* offsets) {
  const int block = (int)blockIdx.x;
  if (block < given.blocks) {
    i64 place = (i64)block * (THREADS * ITEMS) + threadIdx.x;
    int feature = 0;
    for (int item = 0; item < ITEMS && place < given.first[given.features]; ++item, place += THREADS) {
      feature = feature_of(given, place, feature);
      ids[place] = given.ids[feature][place - given.first[feature]];
    }
    return;
  }
  const i64 all = given.features * given.bags;
  i64 place = (i64)(block - given.blocks) * (THREADS * ITEMS) + threadIdx.x;
  for (int item = 0; item < ITEMS && place <= all; ++item, place += THREADS) {
    if (place == all) {
      offsets[place] = given.first[given.features];
    } else {
      const int feature = (int)(place / given.bags);
      const i64 bag = place - feature * given.bags;
      const i64* own = given.offsets[feature];
      offsets[place] = given.first[feature] + (own ? own[bag] : bag);
    }
  }
}
