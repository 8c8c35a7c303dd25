// Sixteen 32-bit lanes for processors whose registers hold fewer, with the operators of a compiler vector: a compiler takes
// operations on vectors wider than a register apart, lane by lane.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif

template <class E>
struct Lanes {
  typedef E Register __attribute__((vector_size(REGISTER_BYTES)));
  static constexpr int PART_LANES = REGISTER_BYTES / sizeof(E), PARTS = 16 / PART_LANES;
  Register part[PARTS];

  Lanes() = default;
  template <class... Rest, class = std::enable_if_t<sizeof...(Rest) == 15>>
  Lanes(E first, Rest... rest) {
    const E lanes[] = {first, (E)rest...};
    *this = load(lanes);
  }
  template <class F>
  explicit Lanes(const Lanes<F>& bits) {
    for_parts([&](int p) { part[p] = (Register)bits.part[p]; });
  }
  template <class Bits, class = std::enable_if_t<sizeof(Bits) == 64 && std::is_same_v<Bits, vhh>>>
  explicit Lanes(const Bits& bits) { *this = load(&bits); }

  E operator[](long lane) const { return part[lane / PART_LANES][lane % PART_LANES]; }
  // The address of 64 bytes.
  static Lanes load(const void* from) {
    return of_parts([&](int p) {
      Register found;
      std::memcpy(&found, (const char*)from + p * REGISTER_BYTES, REGISTER_BYTES);
      return found;
    });
  }
  void store(void* to) const {
    for_parts([&](int p) { std::memcpy((char*)to + p * REGISTER_BYTES, &part[p], REGISTER_BYTES); });
  }

  template <class F>
  static Lanes of_parts(F part_of) {
    Lanes found;
    for_parts([&](int p) { found.part[p] = (Register)part_of(p); });
    return found;
  }
  template <class F>
  static void for_parts(F call) {
    call(0), call(1);
    if constexpr (PARTS == 4) call(2), call(3);
  }
};

// Scalars are taken as sixteen equal lanes.
#define LANES_OPERATOR(op, RESULT)                                                                              \
  template <class E>                                                                                            \
  static inline Lanes<RESULT> operator op(Lanes<E> a, Lanes<E> b) {                                             \
    return Lanes<RESULT>::of_parts([&](int p) { return a.part[p] op b.part[p]; });                              \
  }                                                                                                             \
  template <class E, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                \
  static inline Lanes<RESULT> operator op(Lanes<E> a, S b) {                                                    \
    return Lanes<RESULT>::of_parts([&](int p) { return a.part[p] op (E) b; });                                  \
  }                                                                                                             \
  template <class E, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                \
  static inline Lanes<RESULT> operator op(S a, Lanes<E> b) {                                                    \
    return Lanes<RESULT>::of_parts([&](int p) { return (E)a op b.part[p]; });                                   \
  }
#define LANES_ARITHMETIC(op)                                                                                    \
  LANES_OPERATOR(op, E)                                                                                         \
  template <class E, class B>                                                                                   \
  static inline Lanes<E>& operator op##=(Lanes<E>& a, B b) { return a = a op b; }
LANES_ARITHMETIC(+)
LANES_ARITHMETIC(-)
LANES_ARITHMETIC(*)
LANES_ARITHMETIC(/)
LANES_ARITHMETIC(&)
LANES_ARITHMETIC(|)
LANES_ARITHMETIC(^)
LANES_ARITHMETIC(<<)
LANES_ARITHMETIC(>>)
LANES_OPERATOR(<, int32_t)
LANES_OPERATOR(>, int32_t)
LANES_OPERATOR(>=, int32_t)
LANES_OPERATOR(==, int32_t)
LANES_OPERATOR(!=, int32_t)
template <class E>
static inline Lanes<E> operator-(Lanes<E> a) {
  return Lanes<E>::of_parts([&](int p) { return -a.part[p]; });
}
template <class E>
static inline Lanes<E> operator~(Lanes<E> a) {
  return Lanes<E>::of_parts([&](int p) { return ~a.part[p]; });
}

// Lane i of the result is lane LANE[i] of a and b, one behind the other; a register of it takes lanes of at most two.
template <class E, int... LANE>
struct Shuffle {
  static constexpr int lanes[] = {LANE...}, size = Lanes<E>::PART_LANES;
  static constexpr int first(int p) { return lanes[p * size] / size; }
  static constexpr int second(int p) {
    for (int i = 0; i < size; ++i)
      if (lanes[p * size + i] / size != first(p)) return lanes[p * size + i] / size;
    return first(p);
  }
  static constexpr int place(int p, int i) {
    const int lane = lanes[p * size + i];
    return lane % size + (lane / size == first(p) ? 0 : size);
  }
  static constexpr bool takes_two() {
    for (int p = 0; p < Lanes<E>::PARTS; ++p)
      for (int i = 0; i < size; ++i)
        if (lanes[p * size + i] / size != first(p) && lanes[p * size + i] / size != second(p)) return false;
    return true;
  }
  template <int P, int... I>
  static auto part(const Lanes<E>& a, const Lanes<E>& b, std::integer_sequence<int, I...>) {
    constexpr int one = first(P), other = second(P), parts = Lanes<E>::PARTS;
    return __builtin_shufflevector(one < parts ? a.part[one % parts] : b.part[one % parts],
                                   other < parts ? a.part[other % parts] : b.part[other % parts], place(P, I)...);
  }
  template <int... P>
  static Lanes<E> of(const Lanes<E>& a, const Lanes<E>& b, std::integer_sequence<int, P...>) {
    static_assert(takes_two());
    Lanes<E> found;
    ((found.part[P] = part<P>(a, b, std::make_integer_sequence<int, size>{})), ...);
    return found;
  }
};
template <int... LANE, class E>
static inline Lanes<E> lanes_of(const Lanes<E>& a, const Lanes<E>& b) {
  return Shuffle<E, LANE...>::of(a, b, std::make_integer_sequence<int, Lanes<E>::PARTS>{});
}

// Each lane converted to another type of lanes.
template <class To, class From>
static inline Lanes<To> convert_lanes(Lanes<From> x) {
  return Lanes<To>::of_parts([&](int p) { return __builtin_convertvector(x.part[p], typename Lanes<To>::Register); });
}
