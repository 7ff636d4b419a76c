//! An interpreter of the PTX that our kernels use, so that their text is executed by tests without a GPU.
//!
//! It follows NVIDIA's "Parallel Thread Execution ISA", and panics for whatever else it meets. Threads run one after the
//! other, in bounds-checked memory: an access outside of it, a misaligned one, and a byte that two threads write are
//! panics. A NaN that arithmetic makes has the bits of NVIDIA's.

use std::collections::HashMap;

/// A module as text, taken apart.
pub(super) struct Module {
    entries: HashMap<String, Function>,
}

struct Function {
    /// Name, offset and bytes of each parameter in the parameter space.
    parameters: Vec<(String, u64, u64)>,
    /// Registers by name, and their bytes (0 for predicates).
    registers: HashMap<String, usize>,
    widths: Vec<u64>,
    labels: HashMap<String, usize>,
    code: Vec<Instruction>,
}

struct Instruction {
    predicate: Option<usize>,
    /// The parts between dots: `ld`, `global`, `v4`, `b32`.
    name: Vec<&'static str>,
    operands: Vec<PtxOperand>,
    text: &'static str,
}

enum PtxOperand {
    Register(usize),
    Special(&'static str),
    Number(u64),
    /// `[base + offset]`.
    Address(Box<PtxOperand>, u64),
    Several(Vec<PtxOperand>),
    /// A label, or the name of a parameter.
    Name(String),
}

/// Grid of a launch.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) columns: u32,
    pub(super) rows: u32,
    pub(super) block: u32,
}

/// Memory of the device: bytes from an address on.
pub(super) struct Memory {
    pub(super) base: u64,
    pub(super) bytes: Vec<u8>,
    writer: Vec<u64>,
    /// The most bytes that one access moved.
    pub(super) widest: u64,
}

impl Memory {
    pub(super) fn new(base: u64, bytes: Vec<u8>) -> Self {
        let writer = vec![0; bytes.len()];
        Self {
            base,
            bytes,
            writer,
            widest: 0,
        }
    }

    fn range(&mut self, address: u64, length: u64) -> std::ops::Range<usize> {
        assert_eq!(address % length, 0, "{length} bytes at {address:#x}");
        let start = address.checked_sub(self.base).expect("below the memory") as usize;
        let range = start..start + length as usize;
        assert!(range.end <= self.bytes.len(), "beyond the memory");
        self.widest = self.widest.max(length);
        range
    }
}

const SPECIAL: [&str; 5] = ["%ctaid.x", "%ctaid.y", "%ntid.x", "%tid.x", "%nctaid.x"];

impl Module {
    pub(super) fn parse(text: &str) -> Self {
        let text: &'static str = text
            .trim_end_matches('\0')
            .lines()
            .map(|line| line.split("//").next().unwrap_or_default())
            .fold(String::new(), |all, line| all + line + "\n")
            .leak();
        let entries = text
            .split(".visible .entry ")
            .skip(1)
            .map(|entry| {
                let (name, rest) = entry.split_once('(').expect("parameters");
                (name.trim().to_owned(), Function::parse(rest))
            })
            .collect();
        Self { entries }
    }

    /// Names of the entries, and types of their parameters.
    pub(super) fn entries(&self) -> HashMap<&str, Vec<u64>> {
        let sizes = |function: &Function| function.parameters.iter().map(|p| p.2).collect();
        self.entries
            .iter()
            .map(|(name, function)| (name.as_str(), sizes(function)))
            .collect()
    }

    /// Runs an entry with its parameters as bytes, one after the other.
    pub(super) fn launch(&self, name: &str, grid: Grid, parameters: &[u8], memory: &mut Memory) {
        let function = &self.entries[name];
        let end = function.parameters.last().map_or(0, |p| p.1 + p.2);
        assert_eq!(parameters.len() as u64, end, "bytes of parameters");
        memory.writer.fill(0);
        for row in 0..grid.rows {
            for column in 0..grid.columns {
                for number in 0..grid.block {
                    let mut thread = Thread {
                        function,
                        values: vec![0; function.widths.len()],
                        specials: [column, row, grid.block, number, grid.columns],
                        parameters,
                        memory,
                        id: (u64::from(row) << 48 | u64::from(column) << 16 | u64::from(number))
                            + 1,
                    };
                    thread.run();
                }
            }
        }
    }
}

fn size_of_type(name: &str) -> u64 {
    match name.trim_start_matches(|c: char| c.is_alphabetic()) {
        "8" => 1,
        "16" => 2,
        "32" => 4,
        "64" => 8,
        _ => panic!("type {name}"),
    }
}

impl Function {
    fn parse(text: &'static str) -> Self {
        let (parameters, rest) = text.split_once(")\n").expect("end of parameters");
        let (head, body) = rest.split_once('{').expect("body");
        assert_eq!(head.trim(), ".maxntid 512, 1, 1");
        let body = body.rsplit_once('}').expect("end of the body").0;
        let mut function = Self {
            parameters: parse_parameters(parameters),
            registers: HashMap::new(),
            widths: Vec::new(),
            labels: HashMap::new(),
            code: Vec::new(),
        };
        let mut rest = body;
        while let Some((statement, after)) = rest.split_once([';', ':']) {
            let is_label = rest.as_bytes()[statement.len()] == b':';
            let statement = statement.trim();
            if is_label {
                let before = function
                    .labels
                    .insert(statement.to_owned(), function.code.len());
                assert!(before.is_none(), "label {statement} twice");
            } else if let Some(declared) = statement.strip_prefix(".reg .") {
                let (kind, names) = declared.split_once(' ').expect("registers");
                let width = if kind == "pred" {
                    0
                } else {
                    size_of_type(kind)
                };
                for name in names.split(',') {
                    let number = function.widths.len();
                    function.widths.push(width);
                    let before = function.registers.insert(name.trim().to_owned(), number);
                    assert!(before.is_none(), "register {name} twice");
                }
            } else {
                let instruction = function.instruction(statement);
                function.code.push(instruction);
            }
            rest = after;
        }
        function
    }

    fn instruction(&self, text: &'static str) -> Instruction {
        let (predicate, rest) = match text.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) = rest.split_once(' ').expect("a predicated instruction");
                (Some(self.registers[name]), rest)
            }
            None => (None, text),
        };
        let (name, operands) = rest.split_once(' ').unwrap_or((rest, ""));
        Instruction {
            predicate,
            name: name.split('.').collect(),
            operands: split_operands(operands)
                .iter()
                .map(|operand| self.operand(operand))
                .collect(),
            text,
        }
    }

    fn operand(&self, text: &str) -> PtxOperand {
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.trim_end_matches(']');
            let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
            return PtxOperand::Address(Box::new(self.operand(base)), number(offset).expect(text));
        }
        if let Some(inner) = text.strip_prefix('{') {
            let inner = inner.trim_end_matches('}');
            let parts = inner.split(',').map(|part| self.operand(part.trim()));
            return PtxOperand::Several(parts.collect());
        }
        if let Some(special) = SPECIAL.iter().find(|special| **special == text) {
            return PtxOperand::Special(special);
        }
        if text.starts_with('%') {
            return PtxOperand::Register(*self.registers.get(text).expect(text));
        }
        match number(text) {
            Some(number) => PtxOperand::Number(number),
            None => PtxOperand::Name(text.to_owned()),
        }
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn split_operands(text: &str) -> Vec<String> {
    let mut depth = 0;
    let mut operands = vec![String::new()];
    for c in text.chars() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                operands.push(String::new());
                continue;
            }
            _ => {}
        }
        operands.last_mut().expect("one at least").push(c);
    }
    operands
        .iter()
        .map(|operand| operand.trim().to_owned())
        .filter(|operand| !operand.is_empty())
        .collect()
}

fn parse_parameters(text: &str) -> Vec<(String, u64, u64)> {
    let mut offset: u64 = 0;
    let mut parameters = Vec::new();
    for parameter in text.split(',') {
        let words: Vec<&str> = parameter.split_whitespace().collect();
        let (name, bytes) = match words[..] {
            [".param", kind, name] => (name.to_owned(), size_of_type(&kind[1..])),
            [".param", ".align", "8", ".b8", array] => {
                let (name, length) = array.trim_end_matches(']').split_once('[').expect("array");
                (name.to_owned(), number(length).expect("length"))
            }
            _ => panic!("parameter {parameter}"),
        };
        parameters.push((name, offset, bytes));
        offset += bytes;
    }
    parameters
}

struct Thread<'a> {
    function: &'a Function,
    values: Vec<u64>,
    /// In the order of [`SPECIAL`].
    specials: [u32; 5],
    parameters: &'a [u8],
    memory: &'a mut Memory,
    id: u64,
}

impl Thread<'_> {
    fn run(&mut self) {
        let mut at = 0;
        for _ in 0..1_000_000 {
            let instruction = &self.function.code[at];
            at += 1;
            if let Some(predicate) = instruction.predicate
                && self.values[predicate] == 0
            {
                continue;
            }
            match instruction.name[0] {
                "ret" => return,
                "bra" => {
                    let PtxOperand::Name(label) = &instruction.operands[0] else {
                        panic!("{}", instruction.text)
                    };
                    at = self.function.labels[label];
                }
                _ => self.step(instruction),
            }
        }
        panic!("a thread that does not end");
    }

    fn step(&mut self, instruction: &Instruction) {
        let name = &instruction.name;
        let operands = &instruction.operands;
        match name[..] {
            ["ld", "param", kind] => {
                let start = self.address(&operands[1]) as usize;
                let bytes = &self.parameters[start..start + size_of_type(kind) as usize];
                let value = bytes
                    .iter()
                    .rev()
                    .fold(0, |all, &b| all << 8 | u64::from(b));
                self.set(&operands[0], value, size_of_type(kind));
            }
            ["ld", "global", ref rest @ ..] => {
                let (parts, size) = parts(rest, &operands[0]);
                let range = {
                    let address = self.address(&operands[1]);
                    self.memory.range(address, size * parts.len() as u64)
                };
                for (i, part) in parts.into_iter().enumerate() {
                    let start = range.start + i * size as usize;
                    let bytes = &self.memory.bytes[start..start + size as usize];
                    let value = bytes
                        .iter()
                        .rev()
                        .fold(0, |all, &b| all << 8 | u64::from(b));
                    self.set(part, value, size);
                }
            }
            ["st", "global", ref rest @ ..] => {
                let (parts, size) = parts(rest, &operands[1]);
                let address = self.address(&operands[0]);
                let range = self.memory.range(address, size * parts.len() as u64);
                for byte in range.clone() {
                    let writer = std::mem::replace(&mut self.memory.writer[byte], self.id);
                    assert_eq!(writer, 0, "two writes of byte {byte}");
                }
                for (i, part) in parts.into_iter().enumerate() {
                    let value = self.get(part).to_le_bytes();
                    let start = range.start + i * size as usize;
                    self.memory.bytes[start..start + size as usize]
                        .copy_from_slice(&value[..size as usize]);
                }
            }
            ["mov", "b32"] if matches!(operands[0], PtxOperand::Several(_)) => {
                let value = self.get(&operands[1]);
                let (parts, _) = parts(&["v2", "b16"], &operands[0]);
                self.set(parts[0], value & 0xffff, 2);
                self.set(parts[1], value >> 16, 2);
            }
            ["mov", "b32"] if matches!(operands[1], PtxOperand::Several(_)) => {
                let (parts, _) = parts(&["v2", "b16"], &operands[1]);
                let value = self.get(parts[0]) | self.get(parts[1]) << 16;
                self.set(&operands[0], value, 4);
            }
            ["setp", compare, kind] => {
                let (a, b) = (self.get(&operands[1]), self.get(&operands[2]));
                let holds = match (compare, kind) {
                    ("ge", "u64") => a >= b,
                    ("ne", "u64") => a != b,
                    ("nan", "f32") => f32_of(a).is_nan() || f32_of(b).is_nan(),
                    _ => panic!("{}", instruction.text),
                };
                self.set(&operands[0], u64::from(holds), 0);
            }
            ["selp", "b32"] => {
                let chosen = if self.get(&operands[3]) == 0 { 2 } else { 1 };
                let value = self.get(&operands[chosen]);
                self.set(&operands[0], value, 4);
            }
            _ => {
                let mut values = [0; 3];
                for (value, operand) in values.iter_mut().zip(&operands[1..]) {
                    *value = self.get(operand);
                }
                let (value, size) = compute(name, &values[..operands.len() - 1]);
                self.set(&operands[0], value, size);
            }
        }
    }

    fn address(&self, operand: &PtxOperand) -> u64 {
        match operand {
            PtxOperand::Address(base, offset) => self.get(base) + offset,
            _ => panic!("an address"),
        }
    }

    fn get(&self, operand: &PtxOperand) -> u64 {
        match operand {
            PtxOperand::Register(number) => self.values[*number],
            PtxOperand::Number(number) => *number,
            PtxOperand::Special(name) => {
                let index = SPECIAL.iter().position(|special| special == name);
                u64::from(self.specials[index.expect("known")])
            }
            PtxOperand::Name(name) => {
                let known = self.function.parameters.iter().find(|p| p.0 == *name);
                known.expect("a parameter").1
            }
            PtxOperand::Address(..) | PtxOperand::Several(_) => panic!("not a value"),
        }
    }

    fn set(&mut self, operand: &PtxOperand, value: u64, size: u64) {
        let PtxOperand::Register(number) = operand else {
            panic!("not a register")
        };
        let width = self.function.widths[*number];
        // Only loads and stores may have registers that are wider than the type.
        assert!(
            size == width || size == 1 && width == 2,
            "width of a register"
        );
        self.values[*number] = value & mask(size.max(1));
    }
}

fn parts<'a>(name: &[&str], operand: &'a PtxOperand) -> (Vec<&'a PtxOperand>, u64) {
    match (name, operand) {
        ([count, kind], PtxOperand::Several(parts)) => {
            assert_eq!(*count, format!("v{}", parts.len()));
            (parts.iter().collect(), size_of_type(kind))
        }
        ([kind], one) => (vec![one], size_of_type(kind)),
        _ => panic!("{name:?}"),
    }
}

fn mask(size: u64) -> u64 {
    u64::MAX >> (64 - 8 * size)
}

fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Instructions whose result depends on their operands only, with the bytes of the result.
fn compute(name: &[&str], values: &[u64]) -> (u64, u64) {
    let shifted = |kind: &str| {
        let bits = 8 * size_of_type(kind);
        u32::try_from(values[1].min(bits)).expect("at most 64")
    };
    match (name, values) {
        (["mov", kind], [a]) => (*a, size_of_type(kind)),
        (["cvta", "to", "global", "u64"], [a]) => (*a, 8),
        (["and", kind], [a, b]) => (a & b, size_of_type(kind)),
        (["or", kind], [a, b]) => (a | b, size_of_type(kind)),
        (["add", kind], [a, b]) => (a.wrapping_add(*b), size_of_type(kind)),
        (["shl", kind], [a, _]) => (
            a.checked_shl(shifted(kind)).unwrap_or(0),
            size_of_type(kind),
        ),
        (["shr", kind @ ("u32" | "u64")], [a, _]) => (
            a.checked_shr(shifted(kind)).unwrap_or(0),
            size_of_type(kind),
        ),
        (["mul", "wide", "u32"], [a, b]) => (a * b, 8),
        (["mad", "wide", "u32"], [a, b, c]) => ((a * b).wrapping_add(*c), 8),
        (["mul", "rn", "f32"], [a, b]) => {
            let product = f32_of(*a) * f32_of(*b);
            let bits = if product.is_nan() {
                0x7fff_ffff
            } else {
                product.to_bits()
            };
            (u64::from(bits), 4)
        }
        (["mul", "rn", "f64"], [a, b]) => {
            let product = f64::from_bits(*a) * f64::from_bits(*b);
            let nan = 0xfff8_0000_0000_0000;
            (
                if product.is_nan() {
                    nan
                } else {
                    product.to_bits()
                },
                8,
            )
        }
        (["cvt", "rn", "f32", "f64"], [a]) => (u64::from((f64::from_bits(*a) as f32).to_bits()), 4),
        (["cvt", "f32", "f16"], [a]) => {
            let value = half::f16::from_bits(*a as u16).to_f32();
            let bits = if value.is_nan() {
                0x7fff_ffff
            } else {
                value.to_bits()
            };
            (u64::from(bits), 4)
        }
        (["cvt", "rn", "f16", "f32"], [a]) => {
            let value = f32_of(*a);
            let narrow = half::f16::from_f32(value).to_bits();
            (u64::from(if value.is_nan() { 0x7fff } else { narrow }), 2)
        }
        (["cvt", "s32", "s16"], [a]) => (i64::from(*a as u16 as i16) as u64, 4),
        (["cvt", to @ ("u16" | "u32" | "u64"), "u16" | "u32" | "u64"], [a]) => {
            (*a, size_of_type(to))
        }
        _ => panic!("{name:?}"),
    }
}
