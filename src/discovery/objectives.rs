#![allow(clippy::disallowed_methods, reason = "it looks again from time to time")]
//! Follows InferenceObjectives: names that requests carry in a header, and the priority of each.
//!
//! They are of one of two groups, or their CRD is not installed at all; the older group is only followed where the
//! newer one is not, as upstream does. Nothing waits for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use kube::runtime::watcher::{self, Event};

use super::kubernetes::{Choice, Settings};
use super::objects::{HasPriority, Objective, OldObjective};
use super::watch::{Place, Watchable};
use crate::telemetry::source::SourceStatus;

const OBJECTIVES: &str = "inferenceobjectives";
/// How often it is looked whether the CRD has been installed.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// Follows the pool's objectives for ever, and tells of every change of their priorities.
pub async fn follow(
    client: Client,
    settings: &Settings,
    status: &Arc<SourceStatus>,
    mut changed: impl FnMut(HashMap<String, i32>),
) {
    let place = settings.place(client, status);
    let pool = match &settings.choice {
        Choice::Pool(name) => Some(name.as_str()),
        Choice::Selector(..) => None,
    };
    loop {
        if is_served(&place.client, "llm-d.ai/v1alpha2").await {
            follow_kind::<Objective>(&place, pool, &mut changed).await;
        } else if is_served(&place.client, "inference.networking.x-k8s.io/v1alpha2").await {
            follow_kind::<OldObjective>(&place, pool, &mut changed).await;
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

async fn is_served(client: &Client, group_version: &str) -> bool {
    let resources = client.list_api_group_resources(group_version).await;
    resources.is_ok_and(|list| list.resources.iter().any(|it| it.name == OBJECTIVES))
}

async fn follow_kind<K: Watchable + HasPriority>(
    place: &Place,
    pool: Option<&str>,
    changed: &mut impl FnMut(HashMap<String, i32>),
) {
    let mut watch = place.watch::<K>(OBJECTIVES, watcher::Config::default());
    // By name: a name is unique in the namespace.
    let mut known: BTreeMap<String, (String, i32)> = BTreeMap::new();
    let mut coming = BTreeMap::new();
    loop {
        let take = |objective: K| {
            let (name, pool, priority) = objective.read();
            (name.to_owned(), (pool.to_owned(), priority))
        };
        match watch.next().await {
            Event::Init => {
                coming.clear();
                continue;
            }
            Event::InitApply(objective) => {
                coming.extend([take(objective)]);
                continue;
            }
            Event::InitDone => known = std::mem::take(&mut coming),
            Event::Apply(objective) => known.extend([take(objective)]),
            Event::Delete(objective) => {
                known.remove(objective.read().0);
            }
        }
        let ours = known.iter().filter(|(_, (of, _))| pool.is_none_or(|pool| pool == of));
        let priorities = ours.map(|(name, (_, priority))| (name.clone(), *priority));
        let priorities: HashMap<String, i32> = priorities.collect();
        tracing::info!(objectives = priorities.len(), "objectives changed");
        changed(priorities);
    }
}
