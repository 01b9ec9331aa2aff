//! Seeded faults: edits of PTX text that find their place by what stands there, so that they survive recompilation.

use crate::syntax;

/// A line of an entry point.
#[derive(Debug, Clone, Copy)]
pub enum Find {
    /// The n-th line (from 0) with this text.
    Nth(&'static str, usize),
    Last(&'static str),
    /// The first line with the second text after the first one with the first.
    After(&'static str, &'static str),
    /// The last line with the second text before the first one with the first.
    Before(&'static str, &'static str),
}

/// What happens to a line.
#[derive(Debug, Clone, Copy)]
pub enum Edit {
    /// It goes.
    Drop(Find),
    /// Every line with one of these texts goes.
    DropEvery(&'static [&'static str]),
    /// Text of the line is replaced.
    Replace(Find, &'static str, &'static str),
    /// Text of every line that has it is replaced.
    ReplaceEvery(&'static str, &'static str),
    /// An operand (by number, then by place in its vector) is computed anew before the instruction: `{new}` from `{old}`.
    Before(Find, usize, &'static str),
    /// A result is changed after the instruction: `{old}` is its register.
    After(Find, usize, usize, &'static str),
    /// Two registers of a vector operand change places.
    Swap(Find, usize, usize, usize),
}

/// Applies an edit to one entry point of a module, on its line, so that line numbers stay.
pub fn apply(text: &str, entry: &str, edit: Edit) -> Result<String, String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let start = lines.iter().position(|line| line.contains(&format!(".entry {entry}(")));
    let start = start.ok_or_else(|| format!("no entry point {entry}"))?;
    let length = lines[start + 1..].iter().position(|line| line.contains(".entry ")).unwrap_or(lines.len() - start - 1);
    let body = start..start + 1 + length;
    declare(&mut lines[body.clone()])?;
    let place = |find| locate(&lines[body.clone()], find).map(|at| body.start + at);
    match edit {
        Edit::Drop(find) => {
            let at = place(find)?;
            lines[at].clear();
        }
        Edit::DropEvery(texts) => {
            let mut found = 0;
            for line in lines[body].iter_mut().filter(|line| texts.iter().any(|text| line.contains(text))) {
                line.clear();
                found += 1;
            }
            if found == 0 {
                return Err(format!("no line with {texts:?}"));
            }
        }
        Edit::Replace(find, from, to) => {
            let at = place(find)?;
            if !lines[at].contains(from) {
                return Err(format!("`{}` has no `{from}`", lines[at].trim()));
            }
            lines[at] = lines[at].replace(from, to);
        }
        Edit::ReplaceEvery(from, to) => {
            let mut found = 0;
            for line in lines[body].iter_mut().filter(|line| line.contains(from)) {
                *line = line.replace(from, to);
                found += 1;
            }
            if found == 0 {
                return Err(format!("no line with `{from}`"));
            }
        }
        Edit::Before(find, operand, compute) => {
            let at = place(find)?;
            let (head, operands) = split(&lines[at])?;
            let old = operands.get(operand).ok_or("no such operand")?.clone();
            let bare = old.trim_matches(['[', ']']);
            let new = if bare.starts_with("%rd") {
                "mutated64"
            } else if bare.starts_with("%f") {
                "mutated_f32"
            } else if bare.starts_with("%p") {
                "mutated_pred"
            } else {
                "mutated32"
            };
            let compute = compute.replace("{new}", new).replace("{old}", bare);
            let mut operands = operands;
            operands[operand] = old.replace(bare, new);
            lines[at] = format!("{compute}; {head} {};", operands.join(", "));
        }
        Edit::After(find, operand, part, compute) => {
            let at = place(find)?;
            let (_, operands) = split(&lines[at])?;
            let whole = operands.get(operand).ok_or("no such operand")?.trim_matches(['{', '}']);
            let old = syntax::operands(whole).get(part).ok_or("no such part")?.to_string();
            lines[at] = format!("{} {};", lines[at], compute.replace("{old}", &old));
        }
        Edit::Swap(find, operand, i, j) => {
            let at = place(find)?;
            let (head, mut operands) = split(&lines[at])?;
            let vector = operands.get(operand).ok_or("no such operand")?.trim_matches(['{', '}']).to_owned();
            let mut parts = syntax::operands(&vector);
            if parts.len() <= i.max(j) {
                return Err(format!("`{vector}` is too short"));
            }
            parts.swap(i, j);
            operands[operand] = format!("{{{}}}", parts.join(", "));
            lines[at] = format!("{head} {};", operands.join(", "));
        }
    }
    Ok(lines.join("\n"))
}

fn locate(body: &[String], find: Find) -> Result<usize, String> {
    let has = |text: &'static str| move |(_, line): &(usize, &String)| line.contains(text);
    let all = || body.iter().enumerate();
    let found = match find {
        Find::Nth(text, n) => all().filter(has(text)).nth(n),
        Find::Last(text) => all().rfind(has(text)),
        Find::After(anchor, text) => all().skip_while(|line| !has(anchor)(line)).skip(1).find(has(text)),
        Find::Before(anchor, text) => {
            let end = all().find(has(anchor)).map_or(0, |(at, _)| at);
            all().take(end).rfind(has(text))
        }
    };
    found.map(|(at, _)| at).ok_or_else(|| format!("no line for {find:?}"))
}

/// Registers that edits compute in.
fn declare(body: &mut [String]) -> Result<(), String> {
    let first = body.iter_mut().find(|line| line.contains("\t.reg .pred")).ok_or("no registers")?;
    *first =
        format!("{first} .reg .b32 mutated32; .reg .b64 mutated64; .reg .f32 mutated_f32; .reg .pred mutated_pred;");
    Ok(())
}

/// A line's guard, label and opcode; its operands.
fn split(line: &str) -> Result<(String, Vec<String>), String> {
    let line = line.trim();
    // A scope of its own: "{ instruction; }".
    let line = line.strip_prefix('{').map_or(line, |inner| inner.trim_end().trim_end_matches('}').trim());
    let line = line.trim_end_matches(';');
    let mut words = 0;
    let mut end = 0;
    for word in line.split_whitespace() {
        end = line[end..].find(word).map_or(end, |at| end + at + word.len());
        words += 1;
        if !word.starts_with('@') && !word.ends_with(':') {
            break;
        }
    }
    if words == 0 {
        return Err("an empty line".into());
    }
    Ok((line[..end].trim().to_owned(), syntax::operands(&line[end..]).into_iter().map(str::to_owned).collect()))
}
