//! Branches and the end.

use super::{Decoded, Raw};
use crate::machine::Flow;
use crate::operand::Operand;

pub fn decode(raw: &Raw<'_>) -> Decoded {
    Ok(Some(match raw.parts[..] {
        ["bra"] | ["bra", "uni"] => {
            let &Operand::Label(to) = raw.operand(0)? else { return Err("not a label".into()) };
            let uniform = raw.parts.len() == 2;
            Box::new(move |c| {
                if uniform && !c.converged(!0) {
                    return Ok(if c.warp.groups.len() > 1 { Flow::Branch(to) } else { Flow::Diverged });
                }
                Ok(Flow::Branch(to))
            })
        }
        ["ret"] | ["exit"] => Box::new(|_| Ok(Flow::Exit)),
        ["trap"] => Box::new(|_| Err(crate::fault::Fault::new("trap"))),
        _ => return Ok(None),
    }))
}
