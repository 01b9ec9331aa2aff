//! PTX text to pieces: statements, labels, scopes, each with its line.

/// A piece of a module.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// `.version 8.6` and its like: a directive that ends with its line.
    Directive,
    /// `.visible .entry name(...) .maxntid ...`, up to the body.
    Header(String),
    Open,
    Close,
    Label(String),
    /// A declaration or an instruction, without its semicolon, blanks squeezed.
    Statement(String),
}

/// Splits a module into pieces with their lines (from 1).
pub fn pieces(text: &str) -> Result<Vec<(usize, Piece)>, String> {
    let mut found = Vec::new();
    let mut line = 1;
    let text = without_comments(text);
    let mut rest = text.as_str();
    loop {
        let trimmed = rest.trim_start();
        line += newlines(&rest[..rest.len() - trimmed.len()]);
        rest = trimmed;
        let Some(first) = rest.chars().next() else { return Ok(found) };
        let (piece, length) = match first {
            '{' => (Piece::Open, 1),
            '}' => (Piece::Close, 1),
            _ if [".version", ".target", ".address_size"].iter().any(|word| rest.starts_with(word)) => {
                (Piece::Directive, rest.find('\n').unwrap_or(rest.len()))
            }
            _ if rest.starts_with(".visible") || rest.starts_with(".entry") => {
                let end = rest.find('{').ok_or_else(|| format!("line {line}: an entry point without a body"))?;
                (Piece::Header(squeezed(&rest[..end])), end)
            }
            _ => match label(rest) {
                Some(name) => (Piece::Label(name.to_owned()), name.len() + 1),
                None => {
                    let end = rest.find(';').ok_or_else(|| format!("line {line}: a statement without an end"))?;
                    (Piece::Statement(squeezed(&rest[..end])), end + 1)
                }
            },
        };
        found.push((line, piece));
        line += newlines(&rest[..length]);
        rest = &rest[length..];
    }
}

/// The label that the text starts with.
fn label(text: &str) -> Option<&str> {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$'))?;
    (end > 0 && text[end..].starts_with(':') && !text[end..].starts_with("::")).then(|| &text[..end])
}

fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.collect::<Vec<_>>().join("\n")
}

fn newlines(text: &str) -> usize {
    text.bytes().filter(|byte| *byte == b'\n').count()
}

fn squeezed(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Splits operands at commas outside brackets.
pub fn operands(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        found.push(last);
    }
    found
}
