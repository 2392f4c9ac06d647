/// Any bytes as a call of the C API. They are read as a plain call on small tensors, at once or by
/// a plan, then as a list of changes to its tensors and structs, most of which make it invalid.
/// Every tensor has exactly the memory that its shape and strides address, or null where that is
/// too much to allocate. Wanted: a status, a message for each failure, and outputs untouched by a
/// call that failed.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "fulgur/c.h"

namespace {

constexpr int64_t kPositions = 80;                     // of cos and sin
constexpr int64_t kPages = 4, kIds = 3, kMaxPage = 9;  // of a cache; ids of a sequence
constexpr int64_t kMaxBytes = 1 << 20, kMaxNumel = 1 << 16, kMaxWorkspace = 1 << 26;

/// Reads the input front to back; zeros follow its end.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  template <class T>
  T value() {
    uint8_t bytes[sizeof(T)];
    for (auto& b : bytes) b = byte();
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  /// From `first` on, wrapping round at `last`: a zero byte gives `usual`.
  int64_t size(int64_t first, int64_t usual, int64_t last) {
    return first + (usual - first + byte()) % (last - first + 1);
  }
  int64_t wild() {
    constexpr int64_t kWild[] = {0,         -1,        1,         2,         INT64_MAX, INT64_MIN,
                                 INT32_MAX, INT32_MIN, 1LL << 40, 1LL << 62, 513,       7};
    const uint8_t i = byte();
    return i < std::size(kWild) ? kWild[i] : value<int64_t>();
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

/// A DLTensor with its memory.
struct Owned {
  DLTensor t{};
  std::vector<int64_t> shape, strides;
  std::unique_ptr<char[]> memory;
  size_t bytes = 0;
  bool is_null = false;  ///< pass a null DLTensor*
  bool has_strides = false;
  uint64_t offset = 0;
  std::vector<char> before;  ///< the memory as it was

  Owned(DLDataType dtype, std::vector<int64_t> sizes) : shape(std::move(sizes)) {
    t.device = {kDLCPU, 0};
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shape.size());
    shape.resize(8, 1);
    strides.resize(8, 1);
    for (int i = t.ndim - 1; i > 0; --i)
      strides[i - 1] = strides[i] * std::max<int64_t>(1, shape[i]);
  }

  /// Allocates what the final shape and strides address, each byte once; false if that is too much.
  bool allocate(uint8_t fill) {
    if (t.ndim < 0 || t.ndim > 8) return false;
    std::vector<int64_t> row_major(8, 1);
    __int128 numel = 1, low = 0, high = 0;
    bool far = false;  // the sum of such reaches, or its bytes, may be more than 128 bits hold
    for (int i = t.ndim - 1; i >= 0; --i) {
      if (shape[i] < 0 || numel > kMaxNumel) return false;
      const __int128 stride = has_strides ? strides[i] : static_cast<int64_t>(numel);
      const __int128 reach = stride * (shape[i] > 0 ? shape[i] - 1 : 0);
      if (reach < -kMaxBytes || reach > kMaxBytes) far = true;
      if (!far) (reach < 0 ? low : high) += reach;
      numel *= shape[i];
    }
    const __int128 element = std::max(1, t.dtype.bits * t.dtype.lanes / 8);
    const __int128 size = numel == 0 ? 0 : (high - low + 1) * element;
    if (numel > kMaxNumel || size > kMaxBytes || offset > 4096) return false;
    if (far && numel != 0) return false;
    bytes = static_cast<size_t>(size) + offset;
    memory = std::make_unique<char[]>(bytes);
    std::memset(memory.get(), fill, bytes);
    t.data = memory.get() - static_cast<int64_t>(numel == 0 ? 0 : low * element);
    return true;
  }

  const DLTensor* pointer() {
    t.shape = shape.data();
    t.strides = has_strides ? strides.data() : nullptr;
    t.byte_offset = offset;
    before.assign(memory.get(), memory.get() + bytes);
    return is_null ? nullptr : &t;
  }

  /// The same data elsewhere; what it was is freed.
  void move() {
    auto moved = std::make_unique<char[]>(bytes);
    std::copy_n(memory.get(), bytes, moved.get());
    if (t.data != nullptr) t.data = moved.get() + (static_cast<char*>(t.data) - memory.get());
    memory = std::move(moved);
  }

  bool unchanged() const { return std::equal(before.begin(), before.end(), memory.get()); }
};

void change(Owned& o, Reader& in) {
  switch (in.byte() % 10) {
    case 0:
      o.is_null = true;
      break;
    case 1:
      o.t.ndim = static_cast<int32_t>(in.wild());
      break;
    case 2:
      o.shape[in.byte() % 4] = in.wild();
      break;
    case 3:
      o.has_strides = true;
      o.strides[in.byte() % 4] = in.wild();
      break;
    case 4:
      o.has_strides = true;
      for (int64_t& stride : o.strides) {
        if (stride > -1000 && stride < 1000) stride *= static_cast<int8_t>(in.byte());
      }
      break;
    case 5:
      o.t.dtype.code = in.byte() % 8;
      break;
    case 6:
      o.t.dtype.bits = in.byte();
      break;
    case 7:
      o.t.dtype.lanes = static_cast<uint16_t>(in.byte());
      break;
    case 8: {
      const int32_t type = in.byte();  // beyond the enum too, as from a newer DLPack
      std::memcpy(&o.t.device.device_type, &type, sizeof type);
      o.t.device.device_id = static_cast<int32_t>(in.byte());
      break;
    }
    case 9:
      o.offset = in.byte();
      break;
  }
}

void fill_ints(Owned& o, Reader& in, bool wild, int64_t step) {
  if (o.bytes % 4 != 0 || o.offset != 0) return;
  uint32_t value = 0;
  for (size_t i = 0; i < o.bytes / 4; ++i) {
    if (wild) value = in.value<uint32_t>();
    std::memcpy(o.memory.get() + 4 * i, &value, 4);
    value += static_cast<uint32_t>(step);
  }
}

/// A struct of the API, and what a newer version may have after it.
template <class Struct>
struct Newer {
  Struct known{};
  uint8_t after[16] = {};

  Newer() { known.struct_size = sizeof(Struct); }

  /// Another size, of memory that is there, and perhaps a field that the library does not know.
  void change(Reader& in) {
    known.struct_size = in.byte() % (sizeof(Struct) + sizeof(after) + 1);
    const uint8_t at = in.byte();
    after[at % sizeof(after)] = in.byte();
  }
};

void check(fulgur_status status, const std::vector<Owned*>& outputs) {
  if (status < FULGUR_OK || status > FULGUR_OUT_OF_MEMORY) std::abort();  // kInternal is a bug too
  if (status == FULGUR_OK) return;
  if (fulgur_last_error()[0] == '\0') std::abort();
  for (const Owned* o : outputs) {
    if (!o->unchanged()) std::abort();
  }
}

/// How a call is made, bit by bit; two bits say of what cache, if any.
enum How {
  kPlan = 1,
  kOwnWorkspace = 2,
  kMoved = 4,
  kPageTable = 8,
  kPageLists = 16,
  kBatchRows = 24,
  kLeftPadded = 32
};

/// A plan, and its run: on other lengths in other memory, with a workspace of the very size.
template <class Args>
void plan_and_run(const Args& args, const fulgur_options* options, Newer<fulgur_run> run, int how,
                  const std::vector<Owned*>& outputs, const std::vector<Owned*>& all,
                  const std::vector<Owned*>& lengths, Reader& in,
                  fulgur_status (*make)(const Args*, const fulgur_options*, fulgur_plan**),
                  fulgur_status (*run_plan)(const fulgur_plan*, const Args*, const fulgur_run*)) {
  fulgur_plan* made = nullptr;
  const fulgur_status planned = make(&args, options, &made);
  const std::unique_ptr<fulgur_plan, decltype(&fulgur_plan_free)> plan(made, fulgur_plan_free);
  check(planned, outputs);
  if ((planned == FULGUR_OK) != (plan != nullptr)) std::abort();
  if (plan == nullptr) return;

  size_t length = 0;
  if (fulgur_plan_explain(plan.get(), nullptr, 0, &length) != FULGUR_OK) std::abort();
  std::string text(length, 'x');  // no room for the 0: cut by one
  if (fulgur_plan_explain(plan.get(), text.data(), length, nullptr) != FULGUR_OK) std::abort();
  if (std::strlen(text.c_str()) + 1 != length) std::abort();

  fulgur_workspace_need need{};
  need.struct_size = sizeof need;
  if (fulgur_plan_workspace(plan.get(), &need) != FULGUR_OK) std::abort();
  const std::align_val_t alignment{static_cast<size_t>(need.alignment)};
  const auto free_aligned = [&](void* data) { operator delete(data, alignment); };
  std::unique_ptr<void, decltype(free_aligned)> workspace(nullptr, free_aligned);
  if ((how & kOwnWorkspace) != 0 && need.bytes > 0 && need.bytes <= kMaxWorkspace) {
    workspace.reset(operator new(static_cast<size_t>(need.bytes), alignment));
    std::memset(workspace.get(), 0, static_cast<size_t>(need.bytes));
    run.known.workspace = workspace.get();
    run.known.workspace_bytes = need.bytes;
  }
  if ((how & kMoved) != 0) {
    for (Owned* o : lengths) fill_ints(*o, in, true, 0);
    for (Owned* o : all) o->move();
  }
  check(run_plan(plan.get(), &args, &run.known), outputs);
}

constexpr DLDataType kDTypes[] = {
    {kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 64, 1}, {kDLInt, 32, 1}};
constexpr DLDataType kF32 = kDTypes[0], kF64 = kDTypes[3], kI32 = kDTypes[4];
constexpr DLDataType kI64 = {kDLInt, 64, 1};
constexpr DLDataType kBool = {6, 8, 1};  // kDLBool, which older DLPack headers lack

constexpr const char* kTexts[] = {
    "",
    "score + pair[h, k]",
    "delta <= 0",
    "doc[b, q] == doc[b, k]",
    "30.0 * tanh(score / 30.0)",
    "select(k < 3, score * pair[h % 3, doc[b, k]], -inf)",
    "t1 = score + 1; t1 * sigmoid(t1) / pair[hk, q + k]",
    "doc[b, k] // 2 % 3 != q >> 1 || bit(doc[b, q], k & 31)",
    "score + pair[h, t5_bucket(delta, 32, 128)]",
    "score == score",
    "pair[0]",
};
/// What texts are made of.
constexpr const char* kTokens[] = {
    "score",      "q",     "k",    "b",      "h",    "delta",   "sk",   "pair[",   "doc[",
    "]",          ", ",    "(",    ")",      "+",    "-",       "*",    "/",       "//",
    "%",          "<",     "<=",   "==",     "!=",   "&&",      "||",   "!",       "&",
    "|",          "^",     "<<",   ">>",     "1",    "0",       "-7",   "0.5",     "inf",
    "nan",        "true",  "31",   "tanh(",  "min(", "select(", "exp(", "to_int(", "t5_bucket(",
    "bit(",       "pow(",  "abs(", "clamp(", "x = ", "; ",      "log(", "rsqrt(",  "32, 128",
    "9999999999", "1e400", " ",    "$",      "\x80",
};

void fuzz(Reader& in) {
  enum { kForward, kBackward, kMerge, kAppend, kScores };
  const uint8_t first = in.byte();
  const int how = first / 4;
  const uint8_t second = in.byte();
  const int what = second >= 240 ? kScores : first % 4;
  const DLDataType dtype = kDTypes[second % 5];
  const int sinks = second / 5 % 3;  // none, given, their gradient wanted
  const bool tree = second / 15 % 2 != 0, prefixes = second / 30 % 2 != 0;
  const bool fused = what == kForward && second / 60 % 2 != 0;  // it appends first
  const bool appends = what == kAppend || fused;
  const int64_t batch = in.size(0, 1, 3), sq = in.size(0, 3, 9), sk = in.size(0, 5, 70);
  const int64_t hk = in.size(1, 1, 3), hq = hk * in.size(1, 1, 3);
  const int64_t d = in.size(1, 4, 40), dv = in.size(1, 4, 40);
  const uint8_t flags = in.byte();
  const bool packed = flags & 1;
  const bool may_cache = what == kForward || what == kAppend || what == kScores;
  const int cache = may_cache ? how & kBatchRows : 0;
  const bool pages = cache == kPageTable || cache == kPageLists;
  const auto rows = [&](int64_t n, int64_t heads, int64_t dim) {
    return packed ? Owned(dtype, {batch * n, heads, dim}) : Owned(dtype, {batch, n, heads, dim});
  };
  const DLDataType lse_dtype = dtype.bits == 64 ? kF64 : kF32;
  const auto lse_like = [&] {
    return packed ? Owned(lse_dtype, {hq, batch * sq}) : Owned(lse_dtype, {batch, hq, sq});
  };

  std::vector<Owned> o;
  o.reserve(40);
  enum {
    kQ,
    kK,
    kV,
    kOut,
    kLse,
    kDout,
    kDq,
    kDk,
    kDv,
    kCuQ,
    kCuK,
    kUsed,
    kSlopes,
    kDlse,
    kRng,
    kTable,
    kIndptr,
    kIndex,
    kLeftpad,
    kSinks,
    kDsinks,
    kCos,
    kSin,
    kTree,
    kUsedQ,
    kPrefixGroups,
    kPrefixLens,
    kBias,
    kDbias,
    kPair,
    kDpair,
    kDoc,
    kScoresOut,
    kRows,
    kCount
  };
  const auto keys = [&](int64_t dim) {
    return pages     ? Owned(dtype, {kPages, 1 + sk % kMaxPage, hk, dim})
           : cache   ? Owned(dtype, {kPages, sk, hk, dim})
           : appends ? Owned(dtype, {batch, sk, hk, dim})
                     : rows(sk, hk, dim);
  };
  // The rows of dk and dv, which append takes as new ones.
  const int64_t s_new = appends ? sq : sk;
  o.push_back(rows(sq, hq, d));
  o.push_back(keys(d));
  o.push_back(keys(dv));
  o.push_back(rows(sq, hq, dv));
  o.push_back(lse_like());
  o.push_back(rows(sq, hq, dv));
  o.push_back(rows(sq, hq, d));
  o.push_back(rows(s_new, hk, d));
  o.push_back(rows(s_new, hk, dv));
  o.emplace_back(kI32, std::vector<int64_t>{batch + 1});
  o.emplace_back(kI32, std::vector<int64_t>{batch + 1});
  o.emplace_back(kI32, std::vector<int64_t>{batch});
  o.push_back(flags & 2 ? Owned(kF32, {batch, hq}) : Owned(kF32, {hq}));
  o.push_back(lse_like());
  o.emplace_back(kI64, std::vector<int64_t>{2});
  o.push_back(cache == kPageLists ? Owned(kI32, {batch * kIds}) : Owned(kI32, {batch, kIds}));
  o.emplace_back(kI32, std::vector<int64_t>{batch + 1});
  o.emplace_back(kI32, std::vector<int64_t>{batch});
  o.emplace_back(kI32, std::vector<int64_t>{batch});
  o.emplace_back(kF32, std::vector<int64_t>{hq});
  o.emplace_back(kF32, std::vector<int64_t>{hq});
  o.emplace_back(flags & 2 ? kF32 : dtype, std::vector<int64_t>{kPositions, d / 2});
  o.emplace_back(flags & 2 ? kF32 : dtype, std::vector<int64_t>{kPositions, d / 2});
  o.push_back(packed ? Owned(kI64, {batch * sq}) : Owned(kI64, {batch, sq}));
  o.emplace_back(kI32, std::vector<int64_t>{batch});
  o.emplace_back(kI32, std::vector<int64_t>{2});
  o.emplace_back(kI32, std::vector<int64_t>{1});
  o.push_back(flags & 2 ? Owned(kF32, {batch, hq, sq, sk}) : Owned(kBool, {1, 1, sq, sk}));
  o.emplace_back(kF32, std::vector<int64_t>{batch, hq, sq, sk});
  o.emplace_back(flags & 2 ? kF32 : dtype, std::vector<int64_t>{hq, sk});
  o.emplace_back(kF32, std::vector<int64_t>{hq, sk});
  o.emplace_back(kI32, std::vector<int64_t>{batch, sk});
  const int64_t longest_k = pages ? kIds * (1 + sk % kMaxPage) : sk;
  o.emplace_back(lse_dtype, std::vector<int64_t>{batch, hq, flags & 16 ? 2 : sq, longest_k});
  o.emplace_back(kI64, std::vector<int64_t>{2});
  o[kCuQ].is_null = !packed;
  o[kCuK].is_null = !packed || (cache != 0 && !appends);
  o[kUsed].is_null = !(flags & 4) && !pages && !appends;
  o[kTable].is_null = !pages;
  o[kIndptr].is_null = cache != kPageLists;
  o[kIndex].is_null = cache != kBatchRows;
  o[kLeftpad].is_null = !may_cache || (how & kLeftPadded) == 0;
  o[kCos].is_null = o[kSin].is_null = !(flags & 8);
  o[kSlopes].is_null = !(flags & 8);
  o[kSinks].is_null = sinks == 0;
  o[kDsinks].is_null = sinks != 2;
  o[kTree].is_null = !tree;
  o[kBias].is_null = second / 120 % 2 == 0;
  o[kDbias].is_null = o[kBias].is_null || (flags & 10) != 2;
  o[kUsedQ].is_null = (flags & 6) != 6;
  o[kPrefixGroups].is_null = o[kPrefixLens].is_null = what != kForward || !prefixes;
  o[kLse].is_null = (flags & 16) != 0;
  o[kDlse].is_null = o[kRng].is_null = (flags & 128) != 0;

  Newer<fulgur_options> newer_options;
  Newer<fulgur_run> newer_run;
  Newer<fulgur_forward_args> forward_args;
  Newer<fulgur_backward_args> backward_args;
  Newer<fulgur_append_args> append_args;
  Newer<fulgur_new_rows> new_rows;
  Newer<fulgur_rotary> rotary;
  Newer<fulgur_var_len> var_len;
  Newer<fulgur_kv_cache> kv_cache;
  Newer<fulgur_shared_prefix> shared_prefix;
  Newer<fulgur_scores_args> scores_args;
  fulgur_options& options = newer_options.known;
  fulgur_run& run = newer_run.known;
  fulgur_options_init(&options, sizeof options);
  double scale = 0.5;
  std::string texts[2];   // of score_mod and mask_mod
  int given_tensors = 0;  // bits: pair, doc, the gradient of pair
  bool odd_binding = false;
  const char* const engines[] = {"", "cpu", "reference", "cuda", "none", nullptr};
  for (int changes = in.byte() % 6; changes > 0; --changes) {
    switch (in.byte() % 16) {
      case 0:
        options.window_left = in.wild();
        break;
      case 1:
        options.window_right = in.wild();
        break;
      case 2:
        scale = in.value<double>();
        options.scale = &scale;
        break;
      case 3:
        options.softcap = in.value<double>();
        break;
      case 4:
        options.dropout_p = in.byte() / 200.0;
        run.dropout_seed = in.value<uint64_t>();
        break;
      case 5:
        options.engine = engines[in.byte() % std::size(engines)];
        break;
      case 6:
        options.threads = static_cast<int>(in.wild());
        break;
      case 7:
        options.max_seqlen_q = in.wild();
        break;
      case 8:
        options.max_seqlen_k = in.wild();
        break;
      case 9:
        switch (in.byte() % 3) {
          case 0:
            newer_options.change(in);
            break;
          case 1:
            newer_run.change(in);
            break;
          case 2:
            switch (in.byte() % 6) {
              case 0:
                var_len.change(in);
                break;
              case 1:
                kv_cache.change(in);
                break;
              case 2:
                shared_prefix.change(in);
                break;
              case 3:
                new_rows.change(in);
                break;
              case 4:
                rotary.change(in);
                break;
              default:
                if (what == kForward) forward_args.change(in);
                if (what == kBackward) backward_args.change(in);
                if (what == kAppend) append_args.change(in);
                if (what == kScores) scores_args.change(in);
            }
            break;
        }
        break;
      case 10:
        options.deterministic = in.byte() & 1;
        options.invariant = in.byte() & 1;
        options.fast_codes = options.invariant;
        if (in.byte() & 1) options.max_workspace = in.wild();
        if (in.byte() & 1) options.chunk = in.wild();
        options.top_left = in.byte() & 1;
        break;
      case 11:
        given_tensors = in.byte();
        odd_binding = given_tensors >= 248;
        for (std::string& text : texts) {
          const uint8_t which = in.byte();
          if (which < std::size(kTexts)) text = kTexts[which];
          for (int n = which >= 128 ? which - 128 : 0; n > 0; --n) {
            text += kTokens[in.byte() % std::size(kTokens)];
          }
        }
        break;
      default:
        change(o[in.byte() % kCount], in);
    }
  }
  const bool wild_ints = (flags & 32) != 0;
  const uint8_t fill = in.byte();
  for (Owned& owned : o) {
    if (!owned.allocate(fill)) owned.t.data = nullptr;
  }
  fill_ints(o[kCuQ], in, wild_ints, sq);
  fill_ints(o[kCuK], in, wild_ints, s_new);
  fill_ints(o[kUsed], in, wild_ints, 1);
  std::vector<Owned*> lengths = {&o[kCuQ], &o[kCuK], &o[kUsed]};
  if (cache != 0 || !o[kLeftpad].is_null) {
    fill_ints(o[kTable], in, wild_ints, 1);
    fill_ints(o[kIndptr], in, wild_ints, kIds);
    fill_ints(o[kIndex], in, wild_ints, 1);
    fill_ints(o[kLeftpad], in, wild_ints, 0);
    lengths.insert(lengths.end(), {&o[kTable], &o[kIndptr], &o[kIndex], &o[kLeftpad]});
  }
  fill_ints(o[kRows], in, wild_ints, 0);
  fill_ints(o[kUsedQ], in, wild_ints, 1);
  lengths.push_back(&o[kUsedQ]);
  if (prefixes) {
    fill_ints(o[kPrefixGroups], in, wild_ints, batch);
    fill_ints(o[kPrefixLens], in, wild_ints, 0);
    lengths.insert(lengths.end(), {&o[kPrefixGroups], &o[kPrefixLens]});
  }
  std::vector<const DLTensor*> p;
  for (Owned& owned : o) p.push_back(owned.pointer());

  std::vector<Owned*> all;
  for (Owned& owned : o) all.push_back(&owned);

  fulgur_var_len& lens = var_len.known;
  lens = {lens.struct_size, p[kCuQ], p[kCuK], p[kUsedQ], p[kUsed]};
  fulgur_kv_cache& tables = kv_cache.known;
  tables = {tables.struct_size, p[kTable], p[kIndptr], p[kIndex], p[kLeftpad]};
  fulgur_shared_prefix& prefix = shared_prefix.known;
  prefix = {prefix.struct_size, p[kPrefixGroups], p[kPrefixLens]};
  fulgur_rotary& angles = rotary.known;
  angles = {angles.struct_size, p[kCos], p[kSin], what == kAppend ? p[kLeftpad] : nullptr,
            flags & 4};
  fulgur_new_rows& added = new_rows.known;
  added = {added.struct_size, p[kK],   p[kV],   p[kDk],  p[kDv],  p[kCuK], p[kUsed], &angles,
           nullptr,           nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};

  // The tensors of expressions, side by side, and room for the last one to be longer.
  std::vector<fulgur_tensor_binding> bindings;
  const auto bind = [&](const char* name, int tensor, const DLTensor* grad) {
    bindings.push_back({sizeof(fulgur_tensor_binding), name, p[tensor], grad});
  };
  const bool differentiates = what == kBackward && (given_tensors & 4) != 0;
  if (given_tensors & 1) bind("pair", kPair, differentiates ? p[kDpair] : nullptr);
  if (given_tensors & 2) bind("doc", kDoc, nullptr);
  const size_t binding_count = odd_binding ? in.byte() : bindings.size();
  bindings.resize(8);
  if (odd_binding) {
    bindings[in.byte() % 3].struct_size = in.byte() % (sizeof(fulgur_tensor_binding) + 17);
    bindings[in.byte() % 3].name = kTokens[in.byte() % std::size(kTokens)];
  }
  options.score_mod = texts[0].empty() ? nullptr : texts[0].c_str();
  options.mask_mod = texts[1].empty() ? nullptr : texts[1].c_str();
  if (what == kForward) {
    fulgur_forward_args& args = forward_args.known;
    args = {args.struct_size, p[kQ],   p[kK],     p[kV],    p[kOut],         p[kLse],
            p[kSlopes],       p[kRng], p[kSinks], p[kTree], &lens,           &tables,
            &prefix,          nullptr, p[kBias],  nullptr,  bindings.data(), binding_count};
    const fulgur_options* given = flags & 64 ? nullptr : &options;
    std::vector<Owned*> outputs = {&o[kOut], &o[kLse]};
    if (fused) {
      // Mostly nothing is said twice.
      if (second < 200) args.k = args.v = nullptr;
      if (second < 215) lens.cu_seqlens_k = lens.seqused_k = nullptr;
      args.append = &added;
      outputs.insert(outputs.end(), {&o[kK], &o[kV]});
    }
    if (how & kPlan) {
      plan_and_run(args, given, newer_run, how, outputs, all, lengths, in, fulgur_plan_forward,
                   fulgur_plan_run_forward);
    } else {
      check(fulgur_forward(&args, given, &run), outputs);
    }
  } else if (what == kBackward) {
    fulgur_backward_args& args = backward_args.known;
    args = {args.struct_size, p[kDout],     p[kQ],      p[kK],  p[kV],      p[kOut],
            p[kLse],          p[kDq],       p[kDk],     p[kDv], p[kSlopes], p[kRng],
            p[kSinks],        p[kDlse],     p[kDsinks], &lens,  p[kBias],   p[kDbias],
            bindings.data(),  binding_count};
    const std::vector<Owned*> outputs = {&o[kDq],     &o[kDk],    &o[kDv],
                                         &o[kDsinks], &o[kDbias], &o[kDpair]};
    if (how & kPlan) {
      plan_and_run(args, &options, newer_run, how, outputs, all, lengths, in, fulgur_plan_backward,
                   fulgur_plan_run_backward);
    } else {
      check(fulgur_backward(&args, &options, &run), outputs);
    }
  } else if (what == kScores) {
    fulgur_scores_args& args = scores_args.known;
    const int stage = fill % 16 < 4 ? fill % 16 : fill == 255 ? -1 : FULGUR_SCORES_PROBABILITIES;
    args = {args.struct_size,
            p[kQ],
            p[kK],
            p[kScoresOut],
            flags & 16 ? p[kRows] : nullptr,
            p[kSlopes],
            p[kSinks],
            p[kTree],
            p[kBias],
            &lens,
            &tables,
            stage,
            bindings.data(),
            binding_count};
    check(fulgur_scores(&args, flags & 64 ? nullptr : &options, &run), {&o[kScoresOut]});
  } else if (what == kAppend) {
    fulgur_append_args& args = append_args.known;
    const bool queries = !o[kCos].is_null && (flags & 16) == 0;
    const DLTensor* const turned = flags & 128 ? p[kQ] : p[kDq];
    args = {args.struct_size,
            &added,
            flags & 2 ? &tables : nullptr,
            queries ? p[kQ] : nullptr,
            queries ? turned : nullptr,
            queries ? p[kCuQ] : nullptr};
    if (cache != 0) args.cache = &tables;
    check(fulgur_append(&args, flags & 64 ? nullptr : &options, &run),
          {&o[kK], &o[kV], &o[kDq], &o[kQ]});
  } else {
    // Parts (dout, lse), twice; the result may be the first part itself.
    Owned result_lse = lse_like();
    result_lse.allocate(fill);
    const DLTensor* const outs[] = {p[kDout], p[kOut]};
    const DLTensor* const lses[] = {p[kLse], p[kLse]};
    const size_t count = in.byte() % 3;
    check(fulgur_merge(outs, lses, count, flags & 128 ? p[kDout] : p[kOut], result_lse.pointer(),
                       flags & 64 ? nullptr : &run),
          {&o[kOut], &o[kDout], &result_lse});
  }
}

}  // namespace

/// LLVM's OpenMP keeps, and at the end forgets, the teams of calls with other numbers of threads.
extern "C" const char* __lsan_default_suppressions() { return "leak:libomp"; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader in(data, size);
  fuzz(in);
  return 0;
}
