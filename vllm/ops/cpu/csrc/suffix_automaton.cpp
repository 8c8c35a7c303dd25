// The suffix automaton of ../../../v1/spec_decode/suffix_automaton.py, which is its specification: equal states, equal
// drafts. Edges are found in a hash table by state and token; those of a state are a list, for copies.
#include <cstdint>
#include <vector>

namespace {

struct Edge {
  int32_t state, token, target, next;
};

class SuffixAutomaton {
 public:
  long size() const { return long(link_.size()); }

  int32_t append(int32_t end, int32_t token) {
    int32_t edge = find(end, token);
    if (edge >= 0) {
      newest_[end] = edge;
      return shortened(end, token, edges_[edge].target);
    }
    const int32_t made = add(length_[end] + 1, 0);
    while (end != -1 && (edge = find(end, token)) < 0) {
      lead(end, token, made);
      end = link_[end];
    }
    if (end != -1) {
      const int32_t known = shortened(end, token, edges_[edge].target);
      link_[made] = known;
    }
    return made;
  }

  // Returns how many tokens there are; `matched` is about how many tokens stood before.
  long continued(int32_t end, long count, long shortest, int64_t* tokens, int64_t* matched) const {
    long found = 0;
    *matched = 0;
    while (found < count) {
      while (end != -1 && newest_[end] < 0) end = link_[end];
      if (end == -1 || length_[end] < shortest) break;
      if (found == 0) *matched = length_[end];
      tokens[found++] = edges_[newest_[end]].token;
      end = edges_[newest_[end]].target;
    }
    return found;
  }

 private:
  static uint64_t mixed(int32_t state, int32_t token) {
    const uint64_t key = (uint64_t(uint32_t(state)) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15u;
    return key ^ key >> 29;
  }

  int32_t find(int32_t state, int32_t token) const {
    for (uint64_t at = mixed(state, token) & mask(); table_[at] >= 0; at = (at + 1) & mask()) {
      const Edge& edge = edges_[table_[at]];
      if (edge.state == state && edge.token == token) return table_[at];
    }
    return -1;
  }

  void lead(int32_t state, int32_t token, int32_t target) {
    if (2 * edges_.size() >= table_.size()) {
      table_.assign(2 * table_.size(), -1);
      for (long edge = 0; edge < long(edges_.size()); ++edge) enter(int32_t(edge));
    }
    edges_.push_back({state, token, target, first_[state]});
    first_[state] = newest_[state] = int32_t(edges_.size()) - 1;
    enter(first_[state]);
  }

  void enter(int32_t edge) {
    uint64_t at = mixed(edges_[edge].state, edges_[edge].token) & mask();
    while (table_[at] >= 0) at = (at + 1) & mask();
    table_[at] = edge;
  }

  uint64_t mask() const { return table_.size() - 1; }

  int32_t add(int32_t length, int32_t link) {
    link_.push_back(link);
    length_.push_back(length);
    first_.push_back(-1);
    newest_.push_back(-1);
    return int32_t(link_.size()) - 1;
  }

  int32_t shortened(int32_t end, int32_t token, int32_t state) {
    const int32_t length = length_[end] + 1;
    if (length_[state] == length) return state;
    const int32_t made = add(length, link_[state]);
    const int32_t newest = newest_[state];
    for (int32_t edge = first_[state]; edge >= 0; edge = edges_[edge].next)
      if (edge != newest) lead(made, edges_[edge].token, edges_[edge].target);
    if (newest >= 0) lead(made, edges_[newest].token, edges_[newest].target);
    link_[state] = made;
    for (int32_t edge; end != -1 && (edge = find(end, token)) >= 0 && edges_[edge].target == state; end = link_[end])
      edges_[edge].target = made;
    return made;
  }

  std::vector<int32_t> link_{-1}, length_{0}, first_{-1}, newest_{-1};  // by state
  std::vector<Edge> edges_;
  std::vector<int32_t> table_ = std::vector<int32_t>(1024, -1);  // edges by state and token
};

}  // namespace

extern "C" void* cpu_automaton_new() { return new SuffixAutomaton; }

extern "C" void cpu_automaton_free(void* automaton) { delete static_cast<SuffixAutomaton*>(automaton); }

extern "C" long cpu_automaton_size(const void* automaton) {
  return static_cast<const SuffixAutomaton*>(automaton)->size();
}

// Appends counts[i] of the tokens, one text after another, to the text in state ends[i], and drafts at most `most`
// tokens that may follow it, in row i of drafts, found[i] of them.
extern "C" void cpu_automaton_step(void* handle, long texts, int64_t* ends, const int64_t* counts,
                                   const int64_t* tokens, long most, long shortest, int64_t* drafts, int64_t* found,
                                   int64_t* matched) {
  SuffixAutomaton& automaton = *static_cast<SuffixAutomaton*>(handle);
  for (long i = 0; i < texts; ++i) {
    for (long left = counts[i]; left > 0; --left) ends[i] = automaton.append(int32_t(ends[i]), int32_t(*tokens++));
  }
  for (long i = 0; i < texts; ++i)
    found[i] = automaton.continued(int32_t(ends[i]), most, shortest, drafts + i * most, matched + i);
}
