//! The name that a misspelt one was meant to be, by edit distance.

/// The name that differs least from what was typed, unless it differs too much to help.
pub fn nearest_of(typed: &str, names: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    names
        .map(|name| (edit_distance(typed, name), name))
        .min()
        .filter(|(distance, name)| *distance * 3 <= name.len())
        .map(|(_, name)| name)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
