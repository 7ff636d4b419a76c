//! Slurm: a list of nodes in its short form, and the tasks of each.

use horovod_settings::{Environment, text_of};

use super::{Found, HOSTS_MAX};
use crate::hosts::{Host, is_host_name, merge, quoted, whole};

pub(super) fn read(env: &dyn Environment) -> Found {
    text_of(env, "SLURM_JOB_ID").or_else(|| text_of(env, "SLURM_JOBID"))?;
    let nodes = text_of(env, "SLURM_JOB_NODELIST").or_else(|| text_of(env, "SLURM_NODELIST"))?;
    Some(hosts_of(env, &nodes))
}

fn hosts_of(env: &dyn Environment, nodes: &str) -> Result<Vec<Host>, String> {
    // srun with a terminal runs one shell, whatever the number of tasks.
    let tasks = text_of(env, "SLURM_STEP_NUM_TASKS").and_then(|text| whole(&text));
    if let Some(tasks) = tasks.filter(|tasks| *tasks > 1)
        && text_of(env, "SLURM_PTY_PORT").is_none()
    {
        return Err(format!(
            "srun starts {tasks} tasks of horovodrun (SLURM_STEP_NUM_TASKS={tasks}), and each would start a whole job: \
             call horovodrun without srun, or let srun start the script itself"
        ));
    }
    let names = expanded(nodes).ok_or_else(|| format!("SLURM_JOB_NODELIST={:?}", quoted(nodes)))?;
    let (variable, per_task) = match text_of(env, "SLURM_TASKS_PER_NODE") {
        Some(_) => ("SLURM_TASKS_PER_NODE", 1),
        None => {
            let cpus = text_of(env, "SLURM_CPUS_PER_TASK").and_then(|text| whole(&text));
            ("SLURM_JOB_CPUS_PER_NODE", cpus.unwrap_or(1).max(1))
        }
    };
    let Some(text) = text_of(env, variable) else {
        return Err(format!(
            "neither SLURM_TASKS_PER_NODE nor {variable} is set"
        ));
    };
    let counts = repeated(&text).ok_or_else(|| format!("{variable}={:?}", quoted(&text)))?;
    if counts.len() != names.len() {
        return Err(format!(
            "SLURM_JOB_NODELIST={:?} has {} nodes, and {variable}={:?} has {}",
            quoted(nodes),
            names.len(),
            quoted(&text),
            counts.len()
        ));
    }
    let hosts = names.into_iter().zip(counts).map(|(name, count)| Host {
        name,
        slots: count / per_task,
    });
    Ok(merge(hosts.collect()))
}

/// The nodes of `n[03-05,9],gpu[1-2]-ib`, in order; `None` if that is no list of nodes.
fn expanded(list: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    for item in outside_brackets(list)? {
        let room = HOSTS_MAX - names.len();
        names.extend(of_item(item, room)?);
    }
    names.iter().all(|name| is_host_name(name)).then_some(names)
}

/// The items between the commas that are in no bracket.
fn outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut items, mut start, mut is_inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if is_inside => return None,
            b'[' => is_inside = true,
            b']' if !is_inside => return None,
            b']' => is_inside = false,
            b',' if !is_inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    (!is_inside).then_some(items)
}

/// The names of one item, at most `most` of them.
fn of_item(item: &str, most: usize) -> Option<Vec<String>> {
    let Some((before, rest)) = item.split_once('[') else {
        return (most > 0).then(|| vec![item.to_owned()]);
    };
    let (ranges, after) = rest.split_once(']')?;
    let mut names = Vec::new();
    let ends = of_item(after, most)?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to) = (whole(first)?, whole(last)?);
        let count = (to.checked_sub(from)? as usize + 1).checked_mul(ends.len())?;
        if names.len() + count > most {
            return None;
        }
        for number in from..=to {
            let number = format!("{number:0width$}", width = first.len());
            names.extend(ends.iter().map(|end| format!("{before}{number}{end}")));
        }
    }
    Some(names)
}

/// The numbers of `2(x3),1`.
fn repeated(text: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for item in text.split(',') {
        let (count, times) = match item.trim().split_once("(x") {
            Some((count, times)) => (count, whole(times.strip_suffix(')')?)?),
            None => (item.trim(), 1),
        };
        if counts.len() + times as usize > HOSTS_MAX {
            return None;
        }
        counts.extend(std::iter::repeat_n(whole(count)?, times as usize));
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Map;
    use super::*;

    #[test]
    fn the_short_form_of_nodes_is_expanded() {
        for (list, expected) in [
            ("n1", "n1"),
            ("n[3-5]", "n3 n4 n5"),
            ("n[03-04,9],other", "n03 n04 n9 other"),
            ("n[098-101]", "n098 n099 n100 n101"),
            ("gpu[1-2]-ib,cpu[7]", "gpu1-ib gpu2-ib cpu7"),
            ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ] {
            assert_eq!(expanded(list).unwrap().join(" "), expected, "{list}");
        }
        for list in [
            "",
            "n[1",
            "n1]",
            "n[[1]]",
            "n[2-1]",
            "n[a-b]",
            "n[1-9999999]",
            "n 1",
            "a,,b",
        ] {
            assert_eq!(expanded(list), None, "{list}");
        }
    }

    #[test]
    fn counts_are_repeated() {
        assert_eq!(repeated("2(x3),1"), Some(vec![2, 2, 2, 1]));
        assert_eq!(repeated("4"), Some(vec![4]));
        for text in ["", "2(x", "2(x3", "x", "1(x99999999)"] {
            assert_eq!(repeated(text), None, "{text}");
        }
    }

    #[track_caller]
    fn check(vars: &[(&'static str, &str)], expected: Result<&str, &str>) {
        let vars = vars
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()));
        let hosts = read(&Map(vars.collect())).unwrap();
        let text = hosts.map(|hosts| {
            let hosts = hosts.iter().map(ToString::to_string);
            hosts.collect::<Vec<_>>().join(",")
        });
        match (text, expected) {
            (Ok(text), Ok(expected)) => assert_eq!(text, expected),
            (Err(text), Err(expected)) => assert!(text.contains(expected), "{text}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn slots_are_tasks_or_processors() {
        let nodes = [("SLURM_JOB_ID", "1"), ("SLURM_JOB_NODELIST", "n[1-3]")];
        let with = |vars: &[(&'static str, &'static str)]| [&nodes[..], vars].concat();
        check(
            &with(&[("SLURM_TASKS_PER_NODE", "2(x2),1")]),
            Ok("n1:2,n2:2,n3:1"),
        );
        check(
            &with(&[("SLURM_JOB_CPUS_PER_NODE", "8(x3)")]),
            Ok("n1:8,n2:8,n3:8"),
        );
        let cpus = [
            ("SLURM_JOB_CPUS_PER_NODE", "8(x3)"),
            ("SLURM_CPUS_PER_TASK", "4"),
        ];
        check(&with(&cpus), Ok("n1:2,n2:2,n3:2"));
        check(
            &with(&[("SLURM_TASKS_PER_NODE", "2")]),
            Err("has 3 nodes, and"),
        );
        check(&with(&[]), Err("neither SLURM_TASKS_PER_NODE nor"));
    }

    #[test]
    fn a_launcher_per_task_is_refused_but_not_a_terminals_shell() {
        let vars = [
            ("SLURM_JOB_ID", "1"),
            ("SLURM_JOB_NODELIST", "n1"),
            ("SLURM_TASKS_PER_NODE", "4"),
            ("SLURM_STEP_NUM_TASKS", "4"),
        ];
        check(&vars, Err("SLURM_STEP_NUM_TASKS=4"));
        check(
            &[&vars[..], &[("SLURM_PTY_PORT", "5")]].concat(),
            Ok("n1:4"),
        );
    }
}
