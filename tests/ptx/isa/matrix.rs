//! `ldmatrix` and `stmatrix`: 8 x 8 matrices of 16-bit elements between rows in shared memory and fragments.

use super::{Decoded, Raw};
use crate::machine::{Flow, LANES};
use crate::operand::{Source, Target};

pub fn decode(raw: &Raw<'_>) -> Decoded {
    let (load, count, transposed) = match raw.parts[..] {
        [name @ ("ldmatrix" | "stmatrix"), "sync", "aligned", "m8n8", count, "shared" | "shared::cta", "b16"] => {
            (name == "ldmatrix", count, false)
        }
        [
            name @ ("ldmatrix" | "stmatrix"),
            "sync",
            "aligned",
            "m8n8",
            count,
            "trans",
            "shared" | "shared::cta",
            "b16",
        ] => (name == "ldmatrix", count, true),
        _ => return Ok(None),
    };
    raw.expect(2)?;
    let count: usize = match count {
        "x1" => 1,
        "x2" => 2,
        "x4" => 4,
        _ => return Err(format!("{count} matrices")),
    };
    let (registers, memory) =
        if load { (raw.operand(0)?, raw.operand(1)?) } else { (raw.operand(1)?, raw.operand(0)?) };
    let parts = registers.parts();
    if parts.len() != count {
        return Err(format!("{} registers for {count} matrices", parts.len()));
    }
    let address = memory.address()?;
    // Row and column of element `half` of a lane.
    let place = move |lane: usize, half: usize| {
        let (a, b) = (lane / 4, 2 * (lane % 4) + half);
        if transposed { (b, a) } else { (a, b) }
    };
    if load {
        let targets = parts.iter().map(|part| part.target(4)).collect::<Result<Vec<Target>, _>>()?;
        return Ok(Some(Box::new(move |c| {
            if !c.converged(!0) {
                return Ok(Flow::Diverged);
            }
            let addresses = address.of(c);
            for (matrix, to) in targets.iter().enumerate() {
                let mut rows = [[0u16; 8]; 8];
                for (row, values) in rows.iter_mut().enumerate() {
                    let lane = 8 * matrix + row;
                    let by = c.by(lane);
                    let bytes = c.block.shared.read(&c.block.order, by, addresses[lane], 16, 16)?;
                    for (value, pair) in values.iter_mut().zip(bytes.chunks_exact(2)) {
                        *value = u16::from_le_bytes([pair[0], pair[1]]);
                    }
                }
                let element = |lane: usize, half: usize| {
                    let (row, column) = place(lane, half);
                    u32::from(rows[row][column])
                };
                c.set32(*to, std::array::from_fn(|lane| element(lane, 1) << 16 | element(lane, 0)));
            }
            Ok(Flow::Next)
        })));
    }
    let sources = parts.iter().map(|part| part.source(4)).collect::<Result<Vec<Source>, _>>()?;
    Ok(Some(Box::new(move |c| {
        if !c.converged(!0) {
            return Ok(Flow::Diverged);
        }
        let addresses = address.of(c);
        c.block.shared.begin_store();
        for (matrix, from) in sources.iter().enumerate() {
            let values = from.u32s(c);
            let mut rows = [[0u8; 16]; 8];
            for (lane, value) in values.iter().enumerate().take(LANES) {
                for half in 0..2 {
                    let (row, column) = place(lane, half);
                    let bits = (value >> (16 * half)) as u16;
                    rows[row][2 * column..][..2].copy_from_slice(&bits.to_le_bytes());
                }
            }
            for (row, bytes) in rows.iter().enumerate() {
                let lane = 8 * matrix + row;
                let by = c.by(lane);
                c.block.shared.write(&c.block.order, by, addresses[lane], bytes, 16)?;
            }
        }
        Ok(Flow::Next)
    })))
}
