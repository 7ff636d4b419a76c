//! `--completion`: what bash, zsh and fish need to complete `horovodrun`, made of the table of options.

use std::fmt::Write as _;

use horovod_settings::Accepts;

use crate::options::{self, OptionSpec, Shell};

impl Shell {
    /// The shell of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "bash" => Some(Self::Bash),
            "zsh" => Some(Self::Zsh),
            "fish" => Some(Self::Fish),
            _ => None,
        }
    }
}

/// The script for this shell.
pub(crate) fn script(shell: Shell) -> String {
    match shell {
        Shell::Bash => bash(),
        Shell::Zsh => zsh(),
        Shell::Fish => fish(),
    }
}

fn shown() -> impl Iterator<Item = &'static OptionSpec> {
    options::all().filter(|spec| !spec.hidden)
}

/// The words that an option's value may be; none if any text is accepted.
fn choices(spec: &OptionSpec) -> Vec<&'static str> {
    let accepts = spec
        .action
        .value_name()
        .and_then(|_| spec.setting())
        .map(|setting| setting.accepts());
    match accepts {
        Some(Accepts::Words(words)) => words,
        _ => Vec::new(),
    }
}

/// One line without what means something to a shell in single quotes.
fn plain(text: &str) -> String {
    text.replace(['\n', '\''], " ")
}

fn bash() -> String {
    let names = |specs: &mut dyn Iterator<Item = &'static OptionSpec>, with: &str| {
        let names: Vec<&str> = specs.flat_map(|spec| spec.names.iter().copied()).collect();
        names.join(with)
    };
    let takes_value = |spec: &&OptionSpec| spec.action.value_name().is_some();
    let all = names(&mut shown(), " ");
    let valued = names(&mut shown().filter(takes_value), "|");
    let mut of_values = String::new();
    for spec in shown() {
        let words = choices(spec);
        if !words.is_empty() {
            let pattern = spec.names.join("|");
            let words = words.join(" ");
            let _ = writeln!(
                of_values,
                "        {pattern}) COMPREPLY=($(compgen -W '{words}' -- \"$cur\")); return ;;"
            );
        }
    }
    format!(
        "# bash completion of horovodrun: eval \"$(horovodrun --completion bash)\"\n\
         _horovodrun() {{\n    \
             local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} at\n    \
             COMPREPLY=()\n    \
             # Bash makes three words of --option=value.\n    \
             if [[ $cur == = ]]; then cur=; elif [[ $prev == = ]]; then prev=${{COMP_WORDS[COMP_CWORD - 2]}}; fi\n    \
             # Behind the first word that is no option the command's own words stand: files are completed.\n    \
             for ((at = 1; at < COMP_CWORD; at++)); do\n        \
                 case ${{COMP_WORDS[at]}} in\n            \
                     {valued}) [[ ${{COMP_WORDS[at + 1]}} == = ]] && ((at++)); ((at++)) ;;\n            \
                     =) ;;\n            \
                     -*) ;;\n            \
                     *) return ;;\n        \
                 esac\n    \
             done\n    \
             case $prev in\n\
             {of_values}        \
                 {valued}) return ;;\n    \
             esac\n    \
             if [[ $cur == -* ]]; then\n        \
                 COMPREPLY=($(compgen -W '{all}' -- \"$cur\"))\n    \
             else\n        \
                 COMPREPLY=($(compgen -c -- \"$cur\"))\n    \
             fi\n\
         }}\n\
         complete -o default -F _horovodrun horovodrun\n"
    )
}

fn zsh() -> String {
    let mut text = "#compdef horovodrun\n\
         # zsh completion of horovodrun: horovodrun --completion zsh > a folder of $fpath, as _horovodrun\n\
         _arguments -S \\\n"
        .to_owned();
    // Characters with a meaning in the specifications of `_arguments`.
    let escaped = |text: &str| {
        let text = plain(text).replace('\\', "\\\\");
        text.replace(':', "\\:")
            .replace('[', "\\[")
            .replace(']', "\\]")
    };
    for spec in shown() {
        let help = escaped(&spec.help());
        for name in spec.names {
            let value = spec.action.value_name().map_or_else(String::new, |value| {
                let words = choices(spec);
                let how = if words.is_empty() {
                    "_default".to_owned()
                } else {
                    format!("({})", words.join(" "))
                };
                format!(":{}:{how}", escaped(value))
            });
            let _ = writeln!(text, "    '*{name}[{help}]{value}' \\");
        }
    }
    text.push_str("    '(-)1:command:_command_names -e' \\\n    '*::arguments:_normal'\n");
    text
}

fn fish() -> String {
    let mut text =
        "# fish completion of horovodrun: horovodrun --completion fish | source\n".to_owned();
    for spec in shown() {
        let mut line = "complete -c horovodrun".to_owned();
        for name in spec.names {
            let kind = match name.strip_prefix("--") {
                Some(_) => "-l",
                None if name.len() == 2 => "-s",
                None => "-o",
            };
            let _ = write!(line, " {kind} {}", name.trim_start_matches('-'));
        }
        let words = choices(spec);
        if !words.is_empty() {
            let _ = write!(line, " -x -a '{}'", words.join(" "));
        } else if spec.action.value_name().is_some() {
            line.push_str(" -r");
        }
        let _ = writeln!(
            text,
            "{line} -d '{}'",
            plain(&spec.help()).replace('\\', "\\\\")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_that_is_shown_is_in_every_script() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell);
            for name in shown().flat_map(|spec| spec.names) {
                let bare = name.trim_start_matches('-');
                assert!(script.contains(bare), "{name} for {shell:?}");
            }
            assert!(
                !script.contains("dialed-agents"),
                "hidden options stay hidden"
            );
            assert!(script.contains("TRACE"), "the words of an option's setting");
        }
    }

    /// The completions that bash finds for a line whose words are these, the last of which is being written.
    fn in_bash(words: &str) -> Option<String> {
        let test = format!(
            "{}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _horovodrun; echo \"${{COMPREPLY[*]}}\"",
            script(Shell::Bash)
        );
        let run = std::process::Command::new("bash")
            .args(["-c", &test])
            .output()
            .ok()?;
        Some(String::from_utf8_lossy(&run.stdout).trim().to_owned())
    }

    #[test]
    fn bash_completes_values_and_options_behind_an_equals_sign() {
        // As `COMP_WORDBREAKS` has it, `=` is a word.
        let Some(words) = in_bash("horovodrun --log-level = TR") else {
            return;
        };
        assert_eq!(words, "TRACE");
        let complete = |words| in_bash(words).expect("bash runs");
        assert!(complete("horovodrun --log-level =").contains("TRACE"));
        assert_eq!(complete("horovodrun --log-level TR"), "TRACE");
        let after = complete("horovodrun --log-level = TRACE --timeline-f");
        assert_eq!(after, "--timeline-filename");
        assert_eq!(
            complete("horovodrun -np 2 --timeline-f"),
            "--timeline-filename"
        );
        // Behind the command its own words stand.
        assert_eq!(complete("horovodrun -np = 2 python --timeline-f"), "");
    }
}
