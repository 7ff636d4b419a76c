//! Words of a text as a shell reads them: quotes and backslashes, nothing else.

/// The words; the error says which quote has no end.
pub(super) fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() => words.extend(word.take()),
            quote @ ('\'' | '"') => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        Some(end) if end == quote => break,
                        Some('\\') if quote == '"' => word.extend(chars.next()),
                        Some(c) => word.push(c),
                        None => return Err(format!("the quote {quote} has no end in {text:?}")),
                    }
                }
            }
            '\\' => word.get_or_insert_default().extend(chars.next()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_a_shell() {
        for (text, words) in [
            ("", &[][..]),
            (" --map-by  ppr:2:node ", &["--map-by", "ppr:2:node"]),
            ("-mca btl ^openib", &["-mca", "btl", "^openib"]),
            (r#"-x "A=b c" -x 'D=$E'"#, &["-x", "A=b c", "-x", "D=$E"]),
            (r"a\ b ''", &["a b", ""]),
            (r#""say \"no\"""#, &["say \"no\""]),
        ] {
            assert_eq!(split(text).expect(text), words, "{text}");
        }
        let why = split("-x 'A=b").expect_err("no end");
        assert_eq!(why, "the quote ' has no end in \"-x 'A=b\"");
    }
}
