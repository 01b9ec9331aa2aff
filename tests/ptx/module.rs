//! Modules: entry points with their registers, variables and decoded instructions.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use crate::isa::{self, Instruction, Raw};
use crate::operand::{Operand, Register, Special};
use crate::syntax::{self, Piece};

/// Where a module's own variables lie; far from every buffer.
const VARIABLES_AT: u64 = 0x7a00_0000_0000;

/// A `.global` variable.
#[derive(Debug)]
pub struct Variable {
    pub address: u64,
    pub bytes: Vec<u8>,
}

/// An entry point.
pub struct Entry {
    pub name: String,
    /// Offset and size of every parameter.
    pub parameters: Vec<(usize, usize)>,
    pub max_threads: u32,
    /// Bytes of static shared memory; dynamic shared memory follows.
    pub static_shared: usize,
    pub code: Vec<Instruction>,
    /// Number of narrow, wide and predicate registers.
    pub registers: [usize; 3],
}

pub struct Module {
    pub variables: Vec<Variable>,
    pub entries: Vec<Entry>,
}

impl Module {
    pub fn parse(text: &str) -> Result<Self, String> {
        let pieces = syntax::pieces(text)?;
        let mut module = Self { variables: Vec::new(), entries: Vec::new() };
        let mut names = HashMap::new();
        let mut dynamic_shared = Vec::new();
        let mut at = 0;
        while at < pieces.len() {
            let (line, piece) = &pieces[at];
            at += 1;
            match piece {
                Piece::Directive => {}
                Piece::Statement(text) if text.starts_with(".pragma") => {}
                Piece::Statement(text) => {
                    let declared = variable(text).map_err(|why| format!("line {line} `{text}`: {why}"))?;
                    match (declared.space, declared.size) {
                        (".extern .shared", 0) => dynamic_shared.push(declared.name.to_owned()),
                        (".global" | ".visible .global" | ".const", _) => {
                            let address = module.variables.last().map_or(VARIABLES_AT, |last: &Variable| {
                                (last.address + last.bytes.len() as u64 + 64).next_multiple_of(256)
                            });
                            names.insert(declared.name.to_owned(), Operand::Value(address));
                            module.variables.push(Variable { address, bytes: declared.bytes() });
                        }
                        _ => return Err(format!("line {line} `{text}`: not known")),
                    }
                }
                Piece::Header(header) => {
                    let length = body_length(&pieces[at..]).ok_or("a body without an end")?;
                    let mut entry = Builder::new(header, names.clone(), &dynamic_shared)?;
                    entry.read(&pieces[at..at + length])?;
                    module.entries.push(entry.finish());
                    at += length;
                }
                other => return Err(format!("line {line}: {other:?} outside an entry point")),
            }
        }
        Ok(module)
    }

    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// Pieces of a body, both braces included.
fn body_length(pieces: &[(usize, Piece)]) -> Option<usize> {
    let mut depth = 0;
    for (at, (_, piece)) in pieces.iter().enumerate() {
        match piece {
            Piece::Open => depth += 1,
            Piece::Close => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at + 1);
        }
    }
    None
}

/// A variable's declaration.
struct Declared<'a> {
    space: &'a str,
    align: usize,
    name: &'a str,
    /// Bytes; 0 for `name[]`.
    size: usize,
    element: usize,
    values: Vec<u64>,
}

impl Declared<'_> {
    /// Initial bytes: what is not named is zero.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            self.values.iter().flat_map(|value| value.to_le_bytes()[..self.element].to_vec()).collect();
        bytes.resize(self.size.max(bytes.len()), 0);
        bytes
    }
}

/// `.global .align 4 .b8 name[16] = {16, 0}`.
fn variable(text: &str) -> Result<Declared<'_>, String> {
    let (left, right) = text.split_once(" = ").unwrap_or((text, ""));
    let (space, rest) = left.split_once(" .align ").ok_or("a variable without alignment")?;
    let [align, kind, name] = rest.split(' ').collect::<Vec<_>>()[..] else { return Err("not a variable".into()) };
    let element = width(kind.trim_start_matches('.')).ok_or("a type that is not known")?;
    let (name, count) = match name.split_once('[') {
        None => (name, 1),
        Some((name, "]")) => (name, 0),
        Some((name, count)) => (name, count.trim_end_matches(']').parse().map_err(|_| "a length that is no number")?),
    };
    let values = right.trim_matches(['{', '}']).split(',').map(str::trim).filter(|value| !value.is_empty());
    let values = values.map(|value| number(value).ok_or(format!("{value} is no number"))).collect::<Result<_, _>>()?;
    let align = align.parse().map_err(|_| "an alignment that is no number")?;
    Ok(Declared { space, align, name, size: count * element, element, values })
}

/// Bytes of a type.
pub fn width(kind: &str) -> Option<usize> {
    match kind {
        "b8" | "u8" | "s8" => Some(1),
        "b16" | "u16" | "s16" | "f16" | "bf16" => Some(2),
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "u16x2" | "s16x2" => Some(4),
        "b64" | "u64" | "s64" | "f64" => Some(8),
        _ => None,
    }
}

/// A literal: integer, or the bits of a float.
fn number(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")).or(text.strip_prefix("0d")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let digits = digits.trim_end_matches('U');
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

/// Reads one entry point.
struct Builder {
    entry: Entry,
    /// Names by scope: module, entry, then inner scopes.
    scopes: Vec<HashMap<String, Operand>>,
    /// Instructions by label; labels live in numbered scopes.
    labels: HashMap<(usize, String), usize>,
    open: Vec<usize>,
}

impl Builder {
    fn new(header: &str, names: HashMap<String, Operand>, dynamic_shared: &[String]) -> Result<Self, String> {
        let wrong = || format!("`{header}`: not an entry point");
        let (_, after) = header.split_once(".entry ").ok_or_else(wrong)?;
        let (name, rest) = after.split_once('(').ok_or_else(wrong)?;
        let (list, directives) = rest.split_once(')').ok_or_else(wrong)?;
        let mut parameters = Vec::new();
        let mut scope = HashMap::new();
        let mut offset = 0usize;
        for text in syntax::operands(list) {
            let words: Vec<&str> = text.split_whitespace().collect();
            let (align, kind, name) = match words[..] {
                [".param", ".align", align, kind, name] => (align.parse().map_err(|_| wrong())?, kind, name),
                [".param", kind, name] => (width(&kind[1..]).ok_or_else(wrong)?, kind, name),
                _ => return Err(wrong()),
            };
            let element = width(&kind[1..]).ok_or_else(wrong)?;
            let (name, count) = match name.split_once('[') {
                None => (name, 1),
                Some((name, count)) => (name, count.trim_end_matches(']').parse().map_err(|_| wrong())?),
            };
            offset = offset.next_multiple_of(align);
            scope.insert(name.to_owned(), Operand::Value(offset as u64));
            parameters.push((offset, element * count));
            offset += element * count;
        }
        let max_threads = directives.split(".maxntid ").nth(1).and_then(|text| text.split(',').next()?.parse().ok());
        for word in directives.split_whitespace().filter(|word| word.starts_with('.')) {
            if ![".maxntid", ".minnctapersm"].contains(&word) {
                return Err(format!("`{header}`: {word} is not known"));
            }
        }
        for name in dynamic_shared {
            // Static variables would come first; no kernel has both.
            scope.insert(name.clone(), Operand::Value(0));
        }
        let entry = Entry {
            name: name.trim().to_owned(),
            parameters,
            max_threads: max_threads.unwrap_or(1024),
            static_shared: 0,
            code: Vec::new(),
            registers: [0; 3],
        };
        Ok(Self { entry, scopes: vec![names, scope], labels: HashMap::new(), open: Vec::new() })
    }

    fn read(&mut self, pieces: &[(usize, Piece)]) -> Result<(), String> {
        self.place_labels(pieces);
        let mut scopes = 0;
        for (line, piece) in pieces {
            let place = |why: String| format!("line {line} {piece:?}: {why}");
            match piece {
                Piece::Open => {
                    self.open.push(scopes);
                    self.scopes.push(HashMap::new());
                    scopes += 1;
                }
                Piece::Close => {
                    self.open.pop();
                    self.scopes.pop();
                }
                Piece::Label(_) => {}
                Piece::Statement(text) if text.starts_with(".pragma") => {}
                Piece::Statement(text) if text.starts_with(".reg ") => self.registers(text).map_err(place)?,
                Piece::Statement(text) if text.starts_with(".shared") => self.shared(text).map_err(place)?,
                Piece::Statement(text) if text.starts_with('.') => return Err(place("not known".into())),
                Piece::Statement(text) => {
                    let instruction = self.instruction(*line, text).map_err(place)?;
                    self.entry.code.push(instruction);
                }
                Piece::Directive | Piece::Header(_) => return Err(place("inside an entry point".into())),
            }
        }
        Ok(())
    }

    fn place_labels(&mut self, pieces: &[(usize, Piece)]) {
        let (mut open, mut scopes, mut index) = (Vec::new(), 0, 0);
        for (_, piece) in pieces {
            match piece {
                Piece::Open => {
                    open.push(scopes);
                    scopes += 1;
                }
                Piece::Close => {
                    open.pop();
                }
                Piece::Label(name) => {
                    self.labels.insert((open[open.len() - 1], name.clone()), index);
                }
                Piece::Statement(text) if !text.starts_with('.') => index += 1,
                _ => {}
            }
        }
    }

    fn registers(&mut self, text: &str) -> Result<(), String> {
        let (kind, names) = text[".reg .".len()..].split_once(' ').ok_or("registers without names")?;
        for name in syntax::operands(names) {
            match name.split_once('<') {
                None => self.register(kind, name.to_owned())?,
                Some((stem, count)) => {
                    let count: usize = count.trim_end_matches('>').parse().map_err(|_| "a count that is no number")?;
                    for index in 0..count {
                        self.register(kind, format!("{stem}{index}"))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn register(&mut self, kind: &str, name: String) -> Result<(), String> {
        let [narrow, wide, predicates] = &mut self.entry.registers;
        let next = |count: &mut usize| {
            *count += 1;
            *count - 1
        };
        let register = match (kind, width(kind)) {
            ("pred", _) => Register::Predicate(next(predicates)),
            (_, Some(1)) => Register::Bits8(next(narrow)),
            (_, Some(2)) => Register::Bits16(next(narrow)),
            (_, Some(4)) => Register::Bits32(next(narrow)),
            (_, Some(8)) => Register::Bits64(next(wide)),
            _ => return Err(format!("registers of type {kind}")),
        };
        let scope = self.scopes.last_mut().ok_or("no scope")?;
        scope.insert(name, Operand::Register(register));
        Ok(())
    }

    fn shared(&mut self, text: &str) -> Result<(), String> {
        let declared = variable(text)?;
        let offset = self.entry.static_shared.next_multiple_of(declared.align);
        self.entry.static_shared = offset + declared.size;
        let name = declared.name.to_owned();
        self.scopes.last_mut().ok_or("no scope")?.insert(name, Operand::Value(offset as u64));
        Ok(())
    }

    fn instruction(&self, line: usize, text: &str) -> Result<Instruction, String> {
        let (guard, rest) = match text.strip_prefix('@') {
            None => (None, text),
            Some(guarded) => {
                let (guard, rest) = guarded.split_once(' ').ok_or("a guard without an instruction")?;
                (Some(self.operand(guard)?.predicate()?), rest.trim())
            }
        };
        let (opcode, list) = rest.split_once(' ').unwrap_or((rest, ""));
        let operands =
            syntax::operands(list).into_iter().map(|one| self.operand(one)).collect::<Result<Vec<_>, _>>()?;
        let raw = Raw::new(opcode, operands);
        Ok(Instruction {
            guard,
            execute: isa::decode(&raw)?,
            line,
            text: text.to_owned(),
            reached: AtomicBool::new(false),
        })
    }

    fn operand(&self, text: &str) -> Result<Operand, String> {
        let text = text.trim();
        if let Some(inner) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
            let parts = syntax::operands(inner).into_iter().map(|part| self.operand(part));
            return Ok(Operand::Vector(parts.collect::<Result<_, _>>()?));
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
            let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
            let offset = number(offset.trim()).ok_or_else(|| format!("{offset} is no number"))?;
            return Ok(Operand::Address(Box::new(self.operand(base)?), offset as i64));
        }
        if let Some((value, predicate)) = text.split_once('|') {
            return Ok(Operand::Beside(Box::new(self.operand(value)?), Box::new(self.operand(predicate)?)));
        }
        if let Some(name) = text.strip_prefix('!') {
            return match self.operand(name)? {
                Operand::Register(register) => Ok(Operand::Not(register)),
                other => Err(format!("not a predicate: {other:?}")),
            };
        }
        if text == "_" {
            return Ok(Operand::Discard);
        }
        if let Some(found) = self.scopes.iter().rev().find_map(|scope| scope.get(text)) {
            return Ok(found.clone());
        }
        if let Some(index) = self.open.iter().rev().find_map(|scope| self.labels.get(&(*scope, text.to_owned()))) {
            return Ok(Operand::Label(*index));
        }
        if let Some(special) = Special::named(text) {
            return Ok(Operand::Special(special));
        }
        number(text).map(Operand::Value).ok_or_else(|| format!("{text} is not known"))
    }

    fn finish(self) -> Entry {
        self.entry
    }
}
