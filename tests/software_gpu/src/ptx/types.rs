//! The types that instructions and registers name.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Type {
    Predicate,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    /// From its name without the dot.
    pub(super) fn from_name(name: &str) -> Option<Type> {
        Some(match name {
            "pred" => Type::Predicate,
            "b8" => Type::B8,
            "b16" => Type::B16,
            "b32" => Type::B32,
            "b64" => Type::B64,
            "u8" => Type::U8,
            "u16" => Type::U16,
            "u32" => Type::U32,
            "u64" => Type::U64,
            "s8" => Type::S8,
            "s16" => Type::S16,
            "s32" => Type::S32,
            "s64" => Type::S64,
            "f16" => Type::F16,
            "f16x2" => Type::F16x2,
            "bf16" => Type::Bf16,
            "bf16x2" => Type::Bf16x2,
            "f32" => Type::F32,
            "f64" => Type::F64,
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Type::Predicate | Type::B8 | Type::U8 | Type::S8 => 1,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 => 2,
            Type::B32 | Type::U32 | Type::S32 | Type::F32 | Type::F16x2 | Type::Bf16x2 => 4,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 => 8,
        }
    }

    /// Whether a register of this type takes 64 bits a lane.
    pub(super) fn is_wide(self) -> bool {
        self.bytes() == 8
    }

    pub(super) fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    pub(super) fn is_float(self) -> bool {
        matches!(
            self,
            Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 | Type::F32 | Type::F64
        )
    }
}

/// Where a variable or an access lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Constant,
    Parameter,
}

/// The upper four bits of a generic address tell its space; zero is global memory, whose addresses are the driver's.
pub(super) mod window {
    pub(in super::super) const SHIFT: u32 = 60;
    pub(in super::super) const SHARED: u64 = 1 << SHIFT;
    pub(in super::super) const LOCAL: u64 = 2 << SHIFT;
    pub(in super::super) const CONSTANT: u64 = 3 << SHIFT;
    /// Variables of the module in global memory.
    pub(in super::super) const MODULE: u64 = 4 << SHIFT;
    pub(in super::super) const PARAMETER: u64 = 5 << SHIFT;
    pub(in super::super) const OFFSET: u64 = (1 << SHIFT) - 1;
}
