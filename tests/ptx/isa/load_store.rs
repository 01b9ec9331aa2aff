//! Loads, stores and atomics.

use super::{Decoded, Execute, Raw};
use crate::fault::Fault;
use crate::machine::{Context, Flow, LANES};
use crate::module::width;
use crate::operand::{Source, Target};

#[derive(Clone, Copy, PartialEq)]
enum Space {
    Parameter,
    Global,
    Shared,
}

/// Type, vector length and space of a load or store.
struct Access<'a> {
    space: Space,
    count: usize,
    kind: &'a str,
    /// Through the read-only cache.
    constant: bool,
}

impl<'a> Access<'a> {
    /// Hints of caching change no result; every other modifier must be known.
    fn parse(parts: &[&'a str]) -> Result<Self, String> {
        let [hints @ .., kind] = parts else { return Err("no type".into()) };
        let mut access = Self { space: Space::Global, count: 1, kind, constant: false };
        let mut named = false;
        for part in hints {
            match *part {
                "param" => (access.space, named) = (Space::Parameter, true),
                "global" => (access.space, named) = (Space::Global, true),
                "shared" | "shared::cta" => (access.space, named) = (Space::Shared, true),
                "v2" => access.count = 2,
                "v4" => access.count = 4,
                "nc" => access.constant = true,
                "ca" | "cg" | "cs" | "wb" | "wt" | "L1::no_allocate" | "L2::128B" | "L2::256B" => {}
                other => return Err(format!("the interpreter does not know .{other}")),
            }
        }
        if named { Ok(access) } else { Err("generic addresses are not known to the interpreter".into()) }
    }
}

pub fn decode(raw: &Raw<'_>) -> Decoded {
    match raw.parts[..] {
        ["ld", ref parts @ ..] => load(raw, &Access::parse(parts)?).map(Some),
        ["st", ref parts @ ..] => store(raw, &Access::parse(parts)?).map(Some),
        ["atom", space, operation, kind] => atomic(raw, space, operation, kind, true).map(Some),
        ["red", space, operation, kind] => atomic(raw, space, operation, kind, false).map(Some),
        _ => Ok(None),
    }
}

fn load(raw: &Raw<'_>, access: &Access<'_>) -> Result<Execute, String> {
    raw.expect(2)?;
    let each = width(access.kind).ok_or("a type that is not known")?;
    let parts = raw.operand(0)?.parts();
    if parts.len() != access.count {
        return Err(format!("{} registers for {} values", parts.len(), access.count));
    }
    // A register may be wider than what is loaded.
    let targets = parts.iter().map(|part| part.any_target()).collect::<Result<Vec<Target>, _>>()?;
    let address = raw.operand(1)?.address()?;
    let (space, constant) = (access.space, access.constant);
    let signed = access.kind.starts_with('s');
    let size = each * access.count;
    Ok(Box::new(move |c| {
        let addresses = address.of(c);
        let mut values = [[0u64; LANES]; 4];
        for lane in c.active() {
            let bytes = fetch(c, space, lane, addresses[lane], size, constant)?;
            for (part, bytes) in values.iter_mut().zip(bytes.chunks_exact(each)) {
                let mut whole = [if signed && bytes[each - 1] >= 128 { 0xff } else { 0 }; 8];
                whole[..each].copy_from_slice(bytes);
                part[lane] = u64::from_le_bytes(whole);
            }
        }
        for (to, values) in targets.iter().zip(&values) {
            c.set64(*to, *values);
        }
        Ok(Flow::Next)
    }))
}

fn fetch<'c>(
    c: &'c mut Context<'_>,
    space: Space,
    lane: usize,
    address: u64,
    size: usize,
    constant: bool,
) -> Result<&'c [u8], Fault> {
    match space {
        Space::Global => {
            let thread = c.thread(lane);
            c.global.read(&thread, address, size, size, constant)
        }
        Space::Shared => {
            let by = c.by(lane);
            c.block.shared.read(&c.block.order, by, address, size, size)
        }
        Space::Parameter => {
            let range = address as usize..address as usize + size;
            if !address.is_multiple_of(size as u64) {
                return Err(Fault::at(lane, format!("parameter byte {address} is not a multiple of {size}")));
            }
            let length = c.block.parameters.len();
            let outside = || Fault::at(lane, format!("parameter byte {address} (+{size}) of {length}"));
            c.block.parameters.get(range).ok_or_else(outside)
        }
    }
}

fn store(raw: &Raw<'_>, access: &Access<'_>) -> Result<Execute, String> {
    raw.expect(2)?;
    let each = width(access.kind).ok_or("a type that is not known")?;
    let address = raw.operand(0)?.address()?;
    let parts = raw.operand(1)?.parts();
    if parts.len() != access.count || access.constant || access.space == Space::Parameter {
        return Err("not a store".into());
    }
    let sources = parts.iter().map(|part| part.any_source()).collect::<Result<Vec<Source>, _>>()?;
    let space = access.space;
    Ok(Box::new(move |c| {
        let addresses = address.of(c);
        let mut values = [[0u64; LANES]; 4];
        for (values, from) in values.iter_mut().zip(&sources) {
            *values = from.u64s(c);
        }
        c.block.shared.begin_store();
        let mut bytes = [0u8; 32];
        let size = each * sources.len();
        for lane in c.active() {
            for (index, part) in values.iter().take(sources.len()).enumerate() {
                bytes[index * each..][..each].copy_from_slice(&part[lane].to_le_bytes()[..each]);
            }
            match space {
                Space::Shared => {
                    let by = c.by(lane);
                    c.block.shared.write(&c.block.order, by, addresses[lane], &bytes[..size], size)?;
                }
                _ => {
                    let thread = c.thread(lane);
                    c.global.write(&thread, addresses[lane], &bytes[..size], size)?;
                }
            }
        }
        Ok(Flow::Next)
    }))
}

/// Lanes take effect in their order.
fn atomic(raw: &Raw<'_>, space: &str, operation: &str, kind: &str, returns: bool) -> Result<Execute, String> {
    let size = width(kind).ok_or("a type that is not known")?;
    let first = usize::from(returns);
    raw.expect(first + 2 + usize::from(operation == "cas"))?;
    let target = if returns { raw.target(size)? } else { Target::Discard };
    let address = raw.operand(first)?.address()?;
    let value = raw.source(first + 1, size)?;
    let swap = if operation == "cas" { raw.source(first + 2, size)? } else { value };
    let shared = match space {
        "shared" | "shared::cta" => true,
        "global" => false,
        _ => return Err(format!("atomics in .{space}")),
    };
    let update = update(operation, kind)?;
    Ok(Box::new(move |c| {
        let (addresses, values, swaps) = (address.of(c), value.u64s(c), swap.u64s(c));
        let mut old = [0; LANES];
        for lane in c.active() {
            let f = |memory: u64| update(memory, values[lane], swaps[lane]);
            old[lane] = if shared {
                let by = c.by(lane);
                c.block.shared.update(&c.block.order, by, addresses[lane], size, f)?
            } else {
                let thread = c.thread(lane);
                c.global.update(&thread, addresses[lane], size, f)?
            };
        }
        c.set64(target, old);
        Ok(Flow::Next)
    }))
}

/// New memory from (memory, value, value to swap in).
fn update(operation: &str, kind: &str) -> Result<fn(u64, u64, u64) -> u64, String> {
    Ok(match (operation, kind) {
        ("add", "u32" | "s32" | "u64") => |memory, value, _| memory.wrapping_add(value),
        ("add", "f32") => {
            |memory, value, _| u64::from((f32::from_bits(memory as u32) + f32::from_bits(value as u32)).to_bits())
        }
        ("min", "u32" | "u64") => |memory, value, _| memory.min(value),
        ("max", "u32" | "u64") => |memory, value, _| memory.max(value),
        ("min", "s32") => |memory, value, _| (memory as i32).min(value as i32) as u64,
        ("max", "s32") => |memory, value, _| (memory as i32).max(value as i32) as u64,
        ("and", "b32" | "b64") => |memory, value, _| memory & value,
        ("or", "b32" | "b64") => |memory, value, _| memory | value,
        ("exch", "b32" | "b64") => |_, value, _| value,
        ("cas", "b32" | "b64") => |memory, value, swap| if memory == value { swap } else { memory },
        _ => return Err(format!("the interpreter does not know the atomic .{operation}.{kind}")),
    })
}
