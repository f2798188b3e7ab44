use proptest::prelude::*;

use super::*;

fn reading() -> Reading {
    Reading {
        family: Family::Primary,
        weight_label: "llm-ring/weight".to_owned(),
        role_label: "llm-d.ai/role".to_owned(),
    }
}

fn rule(ports: &[u16]) -> Rule {
    let labels = BTreeMap::from([("app".to_owned(), "llm".to_owned())]);
    Rule { labels: Some(labels), ports: ports.to_vec() }
}

fn reconciler(ports: &[u16]) -> Reconciler {
    let mut reconciler = Reconciler::new(reading());
    reconciler.set_rule(Some(rule(ports)));
    reconciler
}

/// A ready pod of the pool.
fn pod(uid: &str, name: &str, ip: &str) -> Pod {
    Pod {
        uid: uid.to_owned(),
        name: name.to_owned(),
        created: 0,
        ips: ip.split(' ').filter(|ip| !ip.is_empty()).map(|ip| ip.parse().unwrap()).collect(),
        ready: true,
        ending: false,
        labels: BTreeMap::from([("app".to_owned(), "llm".to_owned())]),
        active_ports: None,
    }
}

fn labelled(mut pod: Pod, key: &str, value: &str) -> Pod {
    pod.labels.insert(key.to_owned(), value.to_owned());
    pod
}

/// The endpoints as `name address`.
fn shown(reconciler: &Reconciler) -> Vec<String> {
    let members = reconciler.members();
    members.endpoints.iter().map(|it| format!("{} {}", it.name, it.address)).collect()
}

#[track_caller]
fn absent(pod: Pod, because: Absence) {
    let mut reconciler = reconciler(&[8000]);
    reconciler.apply(pod);
    let members = reconciler.members();
    assert_eq!((members.endpoints.len(), members.absent), (0, BTreeMap::from([(because, 1)])));
}

#[test]
fn each_port_of_each_pod_is_an_endpoint() {
    let mut all = reconciler(&[8000, 8001]);
    all.apply(pod("1", "b", "10.0.0.1"));
    all.apply(pod("2", "a", "fd00::5"));
    let ranks = [
        "a [fd00::5]:8000",
        "a/rank-1 [fd00::5]:8001",
        "b 10.0.0.1:8000",
        "b/rank-1 10.0.0.1:8001",
    ];
    assert_eq!(shown(&all), ranks);
    // Ports changed: at once, without a word from the pods (B68).
    for (ports, expected) in [
        (&[8000][..], &["a [fd00::5]:8000", "b 10.0.0.1:8000"][..]),
        (&[9000], &["a [fd00::5]:9000", "b 10.0.0.1:9000"]),
        (&[8000, 8000], &["a [fd00::5]:8000", "b 10.0.0.1:8000"]),
        (&[], &[]),
    ] {
        all.set_rule(Some(rule(ports)));
        assert_eq!(shown(&all), expected, "{ports:?}");
    }
}

#[test]
fn only_ready_pods_with_an_address_take_requests() {
    absent(Pod { ready: false, ..pod("1", "a", "10.0.0.1") }, Absence::NotReady);
    absent(Pod { ending: true, ..pod("1", "a", "10.0.0.1") }, Absence::Ending);
    absent(pod("1", "a", ""), Absence::NoAddress);
    for role in ["prefill", "encode", "encode-prefill"] {
        absent(labelled(pod("1", "a", "10.0.0.1"), "llm-d.ai/role", role), Absence::Role);
    }
    for role in ["decode", "prefill-decode", "encode-prefill-decode", "both", "odd"] {
        let mut reconciler = reconciler(&[8000]);
        reconciler.apply(labelled(pod("1", "a", "10.0.0.1"), "llm-d.ai/role", role));
        assert_eq!(shown(&reconciler), ["a 10.0.0.1:8000"], "{role}");
    }
    let mut reconciler = reconciler(&[8000]);
    reconciler.apply(labelled(pod("1", "a", "10.0.0.1"), "app", "other"));
    assert_eq!(reconciler.members(), Members::default());
}

#[test]
fn an_evicted_pod_leaves_when_it_loses_its_address() {
    let mut reconciler = reconciler(&[8000]);
    reconciler.apply(pod("1", "a", "10.0.0.1"));
    reconciler.apply(Pod { ips: Vec::new(), ready: false, ending: true, ..pod("1", "a", "") });
    assert!(shown(&reconciler).is_empty());
}

#[test]
fn the_annotation_says_which_ports_are_live_and_ranks_keep_their_names() {
    let with = |text: &str| {
        let mut reconciler = reconciler(&[8000, 8001, 8002]);
        let active_ports = Some(text.to_owned());
        reconciler.apply(Pod { active_ports, ..pod("1", "a", "10.0.0.1") });
        let members = reconciler.members();
        let ports: Vec<String> = members.endpoints.into_iter().map(|it| it.name).collect();
        (ports.join(" "), members.oddities.len())
    };
    assert_eq!(with("8001, 8002"), ("a/rank-1 a/rank-2".to_owned(), 0));
    assert_eq!(with("8000,9999"), ("a".to_owned(), 0));
    assert_eq!(with("8000,http"), ("a a/rank-1 a/rank-2".to_owned(), 1));
    let none = Some(" ".to_owned());
    absent(Pod { active_ports: none, ..pod("1", "a", "10.0.0.1") }, Absence::NoPort);
}

#[test]
fn the_family_of_a_dual_stack_pod_is_chosen() {
    for (family, expected) in [
        (Family::Primary, "a 10.0.0.5:8000"),
        (Family::V4, "a 10.0.0.5:8000"),
        (Family::V6, "a [fd00::5]:8000"),
    ] {
        let mut reconciler = Reconciler::new(Reading { family, ..reading() });
        reconciler.set_rule(Some(rule(&[8000])));
        reconciler.apply(pod("1", "a", "10.0.0.5 fd00::5"));
        reconciler.apply(pod("2", "b", if family == Family::V6 { "10.0.0.6" } else { "" }));
        assert_eq!(shown(&reconciler), [expected]);
        assert_eq!(reconciler.members().absent, BTreeMap::from([(Absence::NoAddress, 1)]));
    }
}

#[test]
fn weights_and_engines_come_from_labels() {
    let mut reconciler = reconciler(&[8000]);
    let weighs = |uid: &str, weight: &str| {
        let pod = pod(uid, &format!("p{uid}"), &format!("10.0.0.{uid}"));
        labelled(pod, "llm-ring/weight", weight)
    };
    for (uid, weight) in [("1", "2.5"), ("2", "heavy"), ("3", "0"), ("4", "NaN")] {
        reconciler.apply(labelled(weighs(uid, weight), "llm-d.ai/engine-type", "vllm"));
    }
    let members = reconciler.members();
    let weights: Vec<f64> = members.endpoints.iter().map(|it| it.weight).collect();
    assert_eq!((weights, members.oddities.len()), (vec![2.5, 1.0, 1.0, 1.0], 3));
    assert!(members.endpoints.iter().all(|it| it.engine == Engine::Vllm));
}

#[test]
fn the_successor_with_the_same_address_survives_its_predecessors_end() {
    // B67, in both orders of events.
    let (old, new) = (pod("1", "a", "10.0.0.1"), Pod { created: 5, ..pod("2", "a", "10.0.0.1") });
    let ending = Pod { ending: true, ..old.clone() };
    let expect_new = |reconciler: &Reconciler| {
        let members = reconciler.members();
        assert_eq!(members.endpoints.len(), 1);
        assert_eq!(members.endpoints[0].instance, "2");
    };
    let mut reconciler = reconciler(&[8000]);
    reconciler.apply(old.clone());
    reconciler.apply(ending.clone());
    assert!(shown(&reconciler).is_empty());
    reconciler.apply(new.clone());
    expect_new(&reconciler);
    reconciler.delete("1");
    expect_new(&reconciler);
    // The end of the first is heard of late.
    reconciler.apply(old);
    expect_new(&reconciler);
    reconciler.apply(ending);
    reconciler.delete("1");
    expect_new(&reconciler);
}

#[test]
fn pods_that_claim_one_address_do_not_break_the_pool() {
    let mut reconciler = reconciler(&[8000]);
    reconciler.apply(Pod { created: 1, ..pod("1", "a", "10.0.0.1") });
    reconciler.apply(Pod { created: 2, ..pod("2", "b", "10.0.0.1") });
    reconciler.apply(pod("3", "c", "10.0.0.3"));
    assert_eq!(shown(&reconciler), ["b 10.0.0.1:8000", "c 10.0.0.3:8000"]);
    let members = reconciler.members();
    assert_eq!(members.absent, BTreeMap::from([(Absence::Superseded, 1)]));
    assert_eq!(members.oddities.len(), 1);
}

#[test]
fn what_a_list_does_not_have_is_gone() {
    // B62: deletions that nobody saw.
    let mut reconciler = reconciler(&[8000]);
    for uid in ["1", "2", "3"] {
        reconciler.apply(pod(uid, &format!("p{uid}"), &format!("10.0.0.{uid}")));
    }
    let before = shown(&reconciler);
    // A list that breaks off changes nothing, and neither do its remains in the next.
    reconciler.list_begins();
    reconciler.listed(pod("9", "p9", "10.0.0.9"));
    reconciler.list_begins();
    assert_eq!(shown(&reconciler), before);
    reconciler.listed(pod("1", "p1", "10.0.0.1"));
    reconciler.listed(pod("4", "p2", "10.0.0.2"));
    assert_eq!(shown(&reconciler), before);
    reconciler.list_ends();
    assert_eq!(shown(&reconciler), ["p1 10.0.0.1:8000", "p2 10.0.0.2:8000"]);
    reconciler.list_begins();
    reconciler.list_ends();
    assert!(shown(&reconciler).is_empty());
}

#[test]
fn a_pool_that_is_deleted_or_selects_nothing_has_no_endpoints() {
    let mut reconciler = reconciler(&[8000]);
    reconciler.apply(pod("1", "a", "10.0.0.1"));
    reconciler.set_rule(None);
    assert_eq!(reconciler.members(), Members::default());
    reconciler.set_rule(Some(Rule { labels: Some(BTreeMap::new()), ports: vec![8000] }));
    let members = reconciler.members();
    assert_eq!((members.endpoints.len(), members.oddities.len()), (0, 1));
    // Edited while a list is coming in (B70).
    let other = BTreeMap::from([("app".to_owned(), "other".to_owned())]);
    reconciler.list_begins();
    reconciler.listed(pod("1", "a", "10.0.0.1"));
    reconciler.set_rule(Some(Rule { labels: Some(other), ports: vec![8000] }));
    reconciler.listed(labelled(pod("2", "b", "10.0.0.2"), "app", "other"));
    reconciler.list_ends();
    assert_eq!(shown(&reconciler), ["b 10.0.0.2:8000"]);
}

fn any_pod() -> impl Strategy<Value = Pod> {
    (0u8..6, 0u8..3, 0u8..4, 0i64..3, any::<bool>(), any::<bool>()).prop_map(
        |(uid, name, ip, created, ready, ending)| Pod {
            created,
            ready,
            ending,
            ..pod(&uid.to_string(), &format!("p{name}"), &format!("10.0.0.{ip}"))
        },
    )
}

proptest! {
    #[test]
    fn endpoints_always_make_a_pool_and_a_list_equals_its_events(pods in prop::collection::vec(any_pod(), 0..12)) {
        let (mut events, mut list) = (reconciler(&[8000, 8001]), reconciler(&[8000, 8001]));
        list.list_begins();
        for pod in pods {
            events.apply(pod.clone());
            list.listed(pod);
        }
        list.list_ends();
        let members = events.members();
        prop_assert!(crate::pool::PoolSnapshot::new(0, members.endpoints.clone(), 1).is_ok());
        prop_assert_eq!(members, list.members());
    }
}
