#include "bpe.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <stdexcept>
#include <string>

namespace spile {

namespace {

constexpr char kMagic[8] = {'s', 'p', 'i', 'l', 'e', 'B', 'P', 'E'};
constexpr uint32_t kVersion = 1;
constexpr size_t kShort = 64;  // symbols; up to here the quadratic way is the faster one

size_t slot_of(uint64_t key, uint32_t num_slots) {
  const uint64_t mixed = key * 0x9e3779b97f4a7c15u;
  return static_cast<size_t>(((mixed >> 32) * num_slots) >> 32);
}

uint64_t pair_key(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }

uint64_t word_key(const uint8_t* word, size_t n) {  // FNV-1a
  uint64_t key = 0xcbf29ce484222325u;
  for (size_t i = 0; i < n; ++i) key = (key ^ word[i]) * 0x100000001b3u;
  return key;
}

uint32_t num_slots_for(size_t n) { return static_cast<uint32_t>(n + n / 4 + 1); }  // a fifth stays empty

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("damaged table: ") + what);
}

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

Bpe::Bpe(const uint8_t* data, size_t nbytes) {
  require(nbytes >= kHeaderNbytes && reinterpret_cast<uintptr_t>(data) % alignof(uint32_t) == 0, "too short for its header");
  require(std::memcmp(data, kMagic, sizeof kMagic) == 0, "not a table of this kind");
  require(load<uint32_t>(data + 8) == kVersion, "another version");
  num_entries_ = load<uint32_t>(data + 12);
  num_merge_slots_ = load<uint32_t>(data + 16);
  num_word_slots_ = load<uint32_t>(data + 20);
  const uint64_t blob_nbytes = load<uint64_t>(data + 24), meta_nbytes = load<uint64_t>(data + 32);
  const uint64_t num_words32 = 256 + uint64_t{4} * num_merge_slots_ + num_word_slots_ + num_entries_ + 1;
  const uint64_t before_blob = kHeaderNbytes + 4 * num_words32;  // below 2^38: nothing overflows
  require(blob_nbytes <= 0xffffffffu && meta_nbytes <= 0xffffffffu && before_blob + blob_nbytes + meta_nbytes == nbytes,
          "its parts are not as long as the file");

  byte_ids_ = reinterpret_cast<const uint32_t*>(data + kHeaderNbytes);
  merges_ = reinterpret_cast<const MergeSlot*>(byte_ids_ + 256);
  words_ = byte_ids_ + 256 + size_t{4} * num_merge_slots_;
  offsets_ = words_ + num_word_slots_;
  blob_ = data + before_blob;

  const auto is_id = [&](uint32_t id) { return id < num_entries_; };
  for (int byte = 0; byte < 256; ++byte) require(byte_ids_[byte] == kNone || is_id(byte_ids_[byte]), "a byte's id");
  bool has_empty = false;
  for (uint32_t i = 0; i < num_merge_slots_; ++i) {
    const MergeSlot& m = merges_[i];
    if (m.left == kNone) has_empty = true;
    else require(is_id(m.left) && is_id(m.right) && is_id(m.merged), "a merge's ids");
  }
  require(has_empty, "no end to a search for merges");
  has_empty = num_word_slots_ == 0;
  for (uint32_t i = 0; i < num_word_slots_; ++i) {
    if (words_[i] == kNone) has_empty = true;
    else require(is_id(words_[i]), "a word's id");
  }
  require(has_empty, "no end to a search for words");
  require(offsets_[0] == 0 && offsets_[num_entries_] == blob_nbytes, "the bounds of its entries");
  for (uint32_t i = 0; i < num_entries_; ++i) require(offsets_[i] <= offsets_[i + 1], "the order of its entries");
}

const MergeSlot* Bpe::find(uint32_t left, uint32_t right) const {
  for (size_t i = slot_of(pair_key(left, right), num_merge_slots_);; i = i + 1 == num_merge_slots_ ? 0 : i + 1) {
    const MergeSlot& m = merges_[i];
    if (m.left == left && m.right == right) return &m;
    if (m.left == kNone) return nullptr;
  }
}

uint32_t Bpe::find_word(const uint8_t* word, size_t n) const {
  if (num_word_slots_ == 0) return kNone;
  for (size_t i = slot_of(word_key(word, n), num_word_slots_);; i = i + 1 == num_word_slots_ ? 0 : i + 1) {
    const uint32_t id = words_[i];
    if (id == kNone) return kNone;
    if (offsets_[id + 1] - offsets_[id] == n && std::memcmp(blob_ + offsets_[id], word, n) == 0) return id;
  }
}

void Bpe::encode(const uint8_t* word, size_t n, std::vector<uint32_t>* ids) const {
  if (n == 0) return;
  if (const uint32_t whole = find_word(word, n); whole != kNone) {
    ids->push_back(whole);
    return;
  }
  if (n <= kShort) {
    uint32_t symbols[kShort];
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t id = byte_ids_[word[i]];
      if (id != kNone) symbols[count++] = id;  // a byte that is no entry has no id: it is left out
    }
    merge_short(symbols, count, ids);
    return;
  }
  if (n >= kNone) throw std::length_error("a word of 4 GiB");
  std::vector<uint32_t> symbols;
  symbols.reserve(n);
  for (size_t i = 0; i < n; ++i)
    if (const uint32_t id = byte_ids_[word[i]]; id != kNone) symbols.push_back(id);
  merge_long(symbols, ids);
}

void Bpe::merge_short(uint32_t* symbols, size_t n, std::vector<uint32_t>* ids) const {
  const MergeSlot* pairs[kShort];  // of a symbol and the next
  for (size_t i = 0; i + 1 < n; ++i) pairs[i] = find(symbols[i], symbols[i + 1]);
  for (;;) {
    size_t best = n;
    uint32_t rank = kNone;
    for (size_t i = 0; i + 1 < n; ++i) {
      if (pairs[i] && (best == n || pairs[i]->rank < rank)) {
        best = i;
        rank = pairs[i]->rank;
      }
    }
    if (best == n) break;
    symbols[best] = pairs[best]->merged;
    for (size_t i = best + 1; i + 1 < n; ++i) symbols[i] = symbols[i + 1];
    for (size_t i = best + 1; i + 2 < n; ++i) pairs[i] = pairs[i + 1];
    --n;
    if (best > 0) pairs[best - 1] = find(symbols[best - 1], symbols[best]);
    if (best + 1 < n) pairs[best] = find(symbols[best], symbols[best + 1]);
  }
  ids->insert(ids->end(), symbols, symbols + n);
}

void Bpe::merge_long(const std::vector<uint32_t>& symbols, std::vector<uint32_t>* ids) const {
  struct Symbol {
    uint32_t id;              // kNone: merged into one before it
    uint32_t previous, next;  // size(): none
  };
  struct Candidate {
    uint32_t rank, at;
    const MergeSlot* merge;
    bool operator<(const Candidate& other) const {  // the greatest comes first
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const uint32_t n = static_cast<uint32_t>(symbols.size());
  std::vector<Symbol> chain(n);
  for (uint32_t i = 0; i < n; ++i) chain[i] = {symbols[i], i == 0 ? n : i - 1, i + 1};
  std::priority_queue<Candidate> queue;
  const auto consider = [&](uint32_t at) {
    const uint32_t next = chain[at].next;
    if (next == n) return;
    if (const MergeSlot* merge = find(chain[at].id, chain[next].id)) queue.push({merge->rank, at, merge});
  };
  for (uint32_t i = 0; i < n; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = chain[top.at];
    if (left.next == n || left.id != top.merge->left) continue;  // one of the two has been merged since
    Symbol& right = chain[left.next];
    if (right.id != top.merge->right) continue;
    left.id = top.merge->merged;
    right.id = kNone;
    left.next = right.next;
    if (left.next != n) chain[left.next].previous = top.at;
    if (left.previous != n) consider(left.previous);
    consider(top.at);
  }
  for (uint32_t i = 0; i < n; i = chain[i].next) ids->push_back(chain[i].id);
}

std::vector<MergeSlot> hash_merges(const uint32_t* merges, size_t n) {
  const uint32_t num_slots = num_slots_for(n);
  std::vector<MergeSlot> slots(num_slots, {Bpe::kNone, Bpe::kNone, Bpe::kNone, Bpe::kNone});
  for (size_t rank = 0; rank < n; ++rank) {
    const uint32_t left = merges[3 * rank], right = merges[3 * rank + 1];
    size_t i = slot_of(pair_key(left, right), num_slots);
    while (slots[i].left != Bpe::kNone && !(slots[i].left == left && slots[i].right == right)) i = i + 1 == num_slots ? 0 : i + 1;
    slots[i] = {left, right, static_cast<uint32_t>(rank), merges[3 * rank + 2]};
  }
  return slots;
}

std::vector<uint32_t> hash_words(const uint32_t* ids, size_t n, const uint32_t* offsets, const uint8_t* blob) {
  const uint32_t num_slots = num_slots_for(n);
  std::vector<uint32_t> slots(num_slots, Bpe::kNone);
  for (size_t k = 0; k < n; ++k) {
    const uint32_t id = ids[k];
    size_t i = slot_of(word_key(blob + offsets[id], offsets[id + 1] - offsets[id]), num_slots);
    while (slots[i] != Bpe::kNone) i = i + 1 == num_slots ? 0 : i + 1;
    slots[i] = id;
  }
  return slots;
}

}  // namespace spile
