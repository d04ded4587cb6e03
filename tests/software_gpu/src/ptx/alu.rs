//! Arithmetic on the 32 lanes of registers.
//!
//! An operation is a function pointer ([`Alu`]) made from a closure on one lane by [`unary`], [`binary`], [`ternary`],
//! [`compare`] and others: these compute every lane, so that they vectorise, and store those of the mask. The `each_`
//! variants call the closure for the mask's lanes only, for what is slow or does not vectorise anyway. Each is compiled
//! twice, for any CPU and for one with AVX2 and FMA; which one runs is decided once.

use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::lanes::{Bits, LANES, Lane, Lanes, NONE, Predicate, Register, lanes_of, store};

/// The operands of an arithmetic operation: destination `d`, sources `a`, `b`, `c`, predicates written `p`, `q` and
/// read `r`, and a number whose meaning is the operation's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    pub(super) d: Register,
    pub(super) a: Register,
    pub(super) b: Register,
    pub(super) c: Register,
    pub(super) p: Predicate,
    pub(super) q: Predicate,
    pub(super) r: Predicate,
    pub(super) immediate: u32,
}

impl Slots {
    pub(super) const NONE: Slots = Slots {
        d: NONE,
        a: NONE,
        b: NONE,
        c: NONE,
        p: NONE,
        q: NONE,
        r: NONE,
        immediate: 0,
    };
}

/// One arithmetic operation on the lanes of a mask. Unsafe to call where the CPU lacks what it was compiled for;
/// the constructors choose by [`fast_cpu`], so whatever they return is safe to call on this machine.
pub(super) type Alu = unsafe fn(&mut Lanes, &Slots, u32);

/// Whether this CPU has AVX2, FMA and F16C.
pub(super) fn fast_cpu() -> bool {
    static FAST: OnceLock<bool> = OnceLock::new();
    *FAST.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            std::is_x86_feature_detected!("avx2")
                && std::is_x86_feature_detected!("fma")
                && std::is_x86_feature_detected!("f16c")
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            false
        }
    })
}

/// A value of a closure type that captures nothing.
#[inline(always)]
#[expect(
    unsafe_code,
    reason = "function pointers cannot carry their closure, which is empty"
)]
fn conjure<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0) };
    // SAFETY: `F` has no bytes, so a dangling aligned pointer is valid for reading one; `F` is inhabited, since the
    // constructors below take one.
    unsafe { NonNull::<F>::dangling().as_ptr().read() }
}

/// Defines a constructor from a closure to an [`Alu`] that runs `$body`, compiled for any CPU and for a fast one.
macro_rules! alu_constructor {
    ($(#[$doc:meta])* $name:ident<$($generic:ident),*>($($signature:tt)*) = $body:ident) => {
        $(#[$doc])*
        pub(super) fn $name<$($generic: Lane,)* F>(_: F) -> Alu
        where
            F: $($signature)* + Copy + 'static,
        {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn fast<$($generic: Lane,)* F: $($signature)* + Copy>(lanes: &mut Lanes, slots: &Slots, mask: u32) {
                $body::<$($generic,)* F>(lanes, slots, mask, conjure::<F>());
            }
            fn portable<$($generic: Lane,)* F: $($signature)* + Copy>(lanes: &mut Lanes, slots: &Slots, mask: u32) {
                $body::<$($generic,)* F>(lanes, slots, mask, conjure::<F>());
            }
            #[cfg(target_arch = "x86_64")]
            if fast_cpu() {
                return fast::<$($generic,)* F>;
            }
            portable::<$($generic,)* F>
        }
    };
}

alu_constructor!(
    /// d = f(a)
    unary<A, R>(Fn(A) -> R) = unary_body);
alu_constructor!(
    /// d = f(a, b)
    binary<A, B, R>(Fn(A, B) -> R) = binary_body);
alu_constructor!(
    /// d = f(a, b, c)
    ternary<A, B, C, R>(Fn(A, B, C) -> R) = ternary_body);
alu_constructor!(
    /// d = f(a, b, c, immediate)
    ternary_with<A, B, C, R>(Fn(A, B, C, u32) -> R) = ternary_with_body);
alu_constructor!(
    /// d = f(a), only for the mask's lanes
    each_unary<A, R>(Fn(A) -> R) = each_unary_body);
alu_constructor!(
    /// d = f(a, b), only for the mask's lanes
    each_binary<A, B, R>(Fn(A, B) -> R) = each_binary_body);
alu_constructor!(
    /// d = f(a, b, c), only for the mask's lanes
    each_ternary<A, B, C, R>(Fn(A, B, C) -> R) = each_ternary_body);
alu_constructor!(
    /// p = f(a, b) and q = its complement, each combined with r as `immediate` says; see [`combine`]
    compare<A, B>(Fn(A, B) -> bool) = compare_body);
alu_constructor!(
    /// d = r ? a : b
    select<A>(Fn(A) -> A) = select_body);
alu_constructor!(
    /// d, r = f(a, b, carry r); sets r if bit 0 of `immediate` is set, reads it if bit 1 is
    carrying<A>(Fn(A, A, bool) -> (A, bool)) = carrying_body);

#[inline(always)]
fn unary_body<A: Lane, R: Lane, F: Fn(A) -> R>(lanes: &mut Lanes, slots: &Slots, mask: u32, f: F) {
    let mut values = [R::Bits::default(); LANES];
    let a = A::Bits::row(lanes, slots.a);
    for lane in 0..LANES {
        values[lane] = f(A::from_bits(a[lane])).to_bits();
    }
    store(lanes, slots.d, mask, &values);
}

#[inline(always)]
fn binary_body<A: Lane, B: Lane, R: Lane, F: Fn(A, B) -> R>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    let mut values = [R::Bits::default(); LANES];
    let (a, b) = (A::Bits::row(lanes, slots.a), B::Bits::row(lanes, slots.b));
    for lane in 0..LANES {
        values[lane] = f(A::from_bits(a[lane]), B::from_bits(b[lane])).to_bits();
    }
    store(lanes, slots.d, mask, &values);
}

#[inline(always)]
fn ternary_body<A: Lane, B: Lane, C: Lane, R: Lane, F: Fn(A, B, C) -> R>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    ternary_with_body(lanes, slots, mask, |a: A, b: B, c: C, _| f(a, b, c));
}

#[inline(always)]
fn ternary_with_body<A: Lane, B: Lane, C: Lane, R: Lane, F: Fn(A, B, C, u32) -> R>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    let mut values = [R::Bits::default(); LANES];
    let a = A::Bits::row(lanes, slots.a);
    let b = B::Bits::row(lanes, slots.b);
    let c = C::Bits::row(lanes, slots.c);
    for lane in 0..LANES {
        let (a, b, c) = (
            A::from_bits(a[lane]),
            B::from_bits(b[lane]),
            C::from_bits(c[lane]),
        );
        values[lane] = f(a, b, c, slots.immediate).to_bits();
    }
    store(lanes, slots.d, mask, &values);
}

#[inline(always)]
fn each_unary_body<A: Lane, R: Lane, F: Fn(A) -> R>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    for lane in lanes_of(mask) {
        let value = f(A::from_bits(A::Bits::row(lanes, slots.a)[lane]));
        R::Bits::row_mut(lanes, slots.d)[lane] = value.to_bits();
    }
}

#[inline(always)]
fn each_binary_body<A: Lane, B: Lane, R: Lane, F: Fn(A, B) -> R>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    for lane in lanes_of(mask) {
        let a = A::from_bits(A::Bits::row(lanes, slots.a)[lane]);
        let b = B::from_bits(B::Bits::row(lanes, slots.b)[lane]);
        R::Bits::row_mut(lanes, slots.d)[lane] = f(a, b).to_bits();
    }
}

#[inline(always)]
fn each_ternary_body<A: Lane, B: Lane, C: Lane, R: Lane, F: Fn(A, B, C) -> R>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    for lane in lanes_of(mask) {
        let a = A::from_bits(A::Bits::row(lanes, slots.a)[lane]);
        let b = B::from_bits(B::Bits::row(lanes, slots.b)[lane]);
        let c = C::from_bits(C::Bits::row(lanes, slots.c)[lane]);
        R::Bits::row_mut(lanes, slots.d)[lane] = f(a, b, c).to_bits();
    }
}

/// How a comparison's outcome is combined with a predicate: the operation in bits 0 and 1, bit 2 negates the predicate.
pub(super) mod combine {
    pub(in super::super) const NOTHING: u32 = 0;
    pub(in super::super) const AND: u32 = 1;
    pub(in super::super) const OR: u32 = 2;
    pub(in super::super) const XOR: u32 = 3;
    pub(in super::super) const NEGATED: u32 = 4;
}

#[inline(always)]
fn compare_body<A: Lane, B: Lane, F: Fn(A, B) -> bool>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    let (a, b) = (A::Bits::row(lanes, slots.a), B::Bits::row(lanes, slots.b));
    let mut outcome = 0u32;
    for lane in 0..LANES {
        outcome |= u32::from(f(A::from_bits(a[lane]), B::from_bits(b[lane]))) << lane;
    }
    store_compared(lanes, slots, mask, outcome);
}

/// Writes a comparison's outcome and its complement, combined with r, to p and q.
pub(super) fn store_compared(lanes: &mut Lanes, slots: &Slots, mask: u32, outcome: u32) {
    let combined = |bits: u32| {
        if slots.immediate == combine::NOTHING {
            return bits;
        }
        let other = lanes.predicate(slots.r, slots.immediate & combine::NEGATED != 0);
        match slots.immediate & 3 {
            combine::AND => bits & other,
            combine::OR => bits | other,
            _ => bits ^ other,
        }
    };
    let (p, q) = (combined(outcome), combined(!outcome));
    lanes.set_predicate(slots.p, mask, p);
    lanes.set_predicate(slots.q, mask, q);
}

#[inline(always)]
fn select_body<A: Lane, F: Fn(A) -> A>(lanes: &mut Lanes, slots: &Slots, mask: u32, f: F) {
    let chosen = lanes.predicate(slots.r, slots.immediate != 0);
    let mut values = [A::Bits::default(); LANES];
    let (a, b) = (A::Bits::row(lanes, slots.a), A::Bits::row(lanes, slots.b));
    for lane in 0..LANES {
        let value = if chosen >> lane & 1 != 0 {
            a[lane]
        } else {
            b[lane]
        };
        values[lane] = f(A::from_bits(value)).to_bits();
    }
    store(lanes, slots.d, mask, &values);
}

#[inline(always)]
fn carrying_body<A: Lane, F: Fn(A, A, bool) -> (A, bool)>(
    lanes: &mut Lanes,
    slots: &Slots,
    mask: u32,
    f: F,
) {
    let carry_in = if slots.immediate & 2 != 0 {
        lanes.predicate(slots.r, false)
    } else {
        0
    };
    let mut carry_out = 0u32;
    for lane in lanes_of(mask) {
        let a = A::from_bits(A::Bits::row(lanes, slots.a)[lane]);
        let b = A::from_bits(A::Bits::row(lanes, slots.b)[lane]);
        let (value, carry) = f(a, b, carry_in >> lane & 1 != 0);
        A::Bits::row_mut(lanes, slots.d)[lane] = value.to_bits();
        carry_out |= u32::from(carry) << lane;
    }
    if slots.immediate & 1 != 0 {
        lanes.set_predicate(slots.r, mask, carry_out);
    }
}

/// Calls an operation.
#[inline(always)]
#[expect(
    unsafe_code,
    reason = "operations are compiled for the CPU they were chosen for"
)]
pub(super) fn call(run: Alu, lanes: &mut Lanes, slots: &Slots, mask: u32) {
    // SAFETY: every `Alu` comes from a constructor above or is a plain function; the constructors take the copy for a
    // fast CPU only where `fast_cpu` has found one.
    unsafe { run(lanes, slots, mask) }
}
