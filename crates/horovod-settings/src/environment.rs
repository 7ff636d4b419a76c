//! Where the variables are looked up.

/// How the variables are looked up; tests pass a map.
pub trait Environment {
    /// Value of one variable, `None` when unset.
    fn get(&self, name: &str) -> Option<String>;
    /// Names of all variables.
    fn names(&self) -> Vec<String>;
}

/// The environment of this process.
#[derive(Clone, Copy, Debug)]
pub struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that reads settings"
    )]
    fn get(&self, name: &str) -> Option<String> {
        std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
    }

    fn names(&self) -> Vec<String> {
        std::env::vars_os()
            .map(|(k, _)| k.to_string_lossy().into_owned())
            .collect()
    }
}

/// Value of a variable; one that holds only spaces counts as unset.
pub fn text_of(env: &dyn Environment, name: &str) -> Option<String> {
    env.get(name).filter(|v| !v.trim().is_empty())
}
