#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "a value of any kind may come where a few are wanted"
)]
//! What model servers say about their KV cache: the msgpack payload of one message -> [`KvBatch`].
//!
//! One envelope, `[time, events, data-parallel rank]`, holds events in two layouts, told apart one by one: arrays whose
//! first element is the name (vLLM up to 0.23, `SGLang` up to 0.5.20) and maps with the name under `type` (all since).
//! Fields were added at the end over time, so a short array has absent fields and a long one has fields to pass over; a
//! field of the wrong type is passed over too when the event means something without it. An event that cannot be read
//! costs that event, not the batch.
//!
//! Nothing is built that is not given out, and no length that a header claims is believed beyond the bytes there are.

use rmp::Marker;
use xxhash_rust::xxh3::xxh3_64;

/// Values beside the tokens that one event may carry: more than images in the longest prompt.
const MAX_EXTRA: usize = 1 << 16;

/// A block's name within one engine and rank; two engines may use one name for different tokens.
///
/// Whole numbers are taken as their 64 bits, signed (`SGLang`) and unsigned (vLLM) alike: an engine uses one of the two,
/// so that -1 and 2^64-1 never meet. A digest of 8, 16 or 32 bytes is taken by its last 8, big-endian, as vLLM makes its
/// own numbers; other bytes and texts are hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(u64);

impl EngineHash {
    /// The name as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        match (bytes.len(), bytes.last_chunk::<8>()) {
            (8 | 16 | 32, Some(tail)) => Self(u64::from_be_bytes(*tail)),
            _ => Self(xxh3_64(bytes)),
        }
    }
}

impl From<u64> for EngineHash {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

/// Where a block lies (`medium`; upper and lower case mean the same).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// In the accelerator's memory; also when the engine does not say.
    #[default]
    Gpu,
    /// In the host's memory (`CPU`, `CPU_PINNED`).
    Cpu,
    /// On a disk or an object store (`STORAGE`, `DISK`, `FS`, `OBJ`).
    Storage,
    /// Elsewhere (`EXTERNAL`, and names not known here).
    Other,
}

impl Tier {
    fn of(medium: &[u8]) -> Self {
        let is = |names: &[&str]| names.iter().any(|n| medium.eq_ignore_ascii_case(n.as_bytes()));
        if is(&["GPU"]) {
            Self::Gpu
        } else if is(&["CPU", "CPU_PINNED"]) {
            Self::Cpu
        } else if is(&["STORAGE", "DISK", "FS", "OBJ"]) {
            Self::Storage
        } else {
            Self::Other
        }
    }
}

/// What the layers of a block's cache group look back at (`kv_cache_spec_kind`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Attention {
    /// The whole prefix (full, MLA and full with sinks); also when the engine does not say.
    #[default]
    Whole,
    /// The last tokens only, as many as given, 0 when the engine does not say.
    Window(u32),
    /// Something else (Mamba states, kinds not known here): a block says nothing about those before it.
    Other,
}

/// The adapter that a block was computed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adapter {
    /// By name, as requests call it.
    Name(Box<str>),
    /// By the number the engine gave it; engines that do not send names yet.
    Id(i64),
}

/// One value that sets a block apart from others of the same tokens. Engines send these without saying what they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Extra {
    /// A bare text: on the first block of a chain mostly the cache salt, elsewhere an image or the like (old engines).
    Text(Box<str>),
    /// An image or the like, and where it begins, in tokens from the block's start (negative: before it).
    Item(Box<str>, i64),
    /// Any other value, by the hash of its bytes.
    Other(u64),
}

/// Blocks that an engine has stored: a run of one chain, each block continuing the one before.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// The blocks, in order.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; none at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// The tokens of all blocks: `block_size` for each, or none at all when blocks named before moved to another tier.
    pub tokens: Vec<u32>,
    /// Tokens in a block; 0 when there are no tokens and the engine does not say.
    pub block_size: u32,
    /// Where they lie.
    pub tier: Tier,
    /// The adapter they belong to.
    pub adapter: Option<Adapter>,
    /// What sets blocks apart, with the block's place in `hashes`, in order. The adapter's name is not among them.
    pub extra: Vec<(u32, Extra)>,
    /// The cache group, of models with several kinds of layers.
    pub group: u32,
    /// The kind of that group's layers.
    pub attention: Attention,
}

/// One thing that happened to a cache.
#[derive(Debug, Clone, PartialEq)]
pub enum KvEvent {
    /// Blocks came. The same block may come twice (two copies) and then goes twice.
    Stored(Stored),
    /// One copy of each of these blocks went.
    Removed {
        /// The blocks.
        hashes: Vec<EngineHash>,
        /// Where they lay.
        tier: Tier,
        /// Their cache group.
        group: u32,
    },
    /// All blocks of this rank went, from all tiers.
    Cleared,
}

/// The events of one step of one engine.
#[derive(Debug, Clone, PartialEq)]
pub struct KvBatch {
    /// The engine's clock at the step, seconds since 1970; not to be compared with ours.
    pub at: f64,
    /// The data-parallel rank, if the engine says.
    pub rank: Option<u32>,
    /// The events that could be read, in order.
    pub events: Vec<KvEvent>,
    /// Events of types not known here.
    pub unknown: usize,
    /// Events that could not be read.
    pub malformed: usize,
}

/// Why a payload is no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It ends before its last value does.
    #[error("the payload is cut off")]
    Truncated,
    /// It is msgpack, but not time and events.
    #[error("the payload is not a batch of events")]
    NotABatch,
    /// It holds a byte that starts no value.
    #[error("the payload is not msgpack")]
    NotMsgpack,
}

/// Reads the payload of one message.
///
/// # Errors
/// It is no batch at all. Events that cannot be read are no error: they are counted in the batch.
pub fn decode(payload: &[u8]) -> Result<KvBatch, WireError> {
    let mut reader = Reader { rest: payload };
    let mut batch = KvBatch { at: 0.0, rank: None, events: Vec::new(), unknown: 0, malformed: 0 };
    let (mut time, mut events) = (false, false);
    let mut field = |reader: &mut Reader<'_>, field: Envelope| {
        match field {
            Envelope::Time => {
                batch.at = reader.head()?.float().ok_or(WireError::NotABatch)?;
                time = true;
            }
            Envelope::Events => {
                let Head::Array(count) = reader.head()? else {
                    return Err(WireError::NotABatch);
                };
                events = true;
                // The shortest event that is kept, a removed one of no blocks, has 16 bytes.
                batch.events.reserve((count as usize).min(reader.rest.len() / 16));
                for _ in 0..count {
                    match reader.isolated(event)? {
                        Some(Some(event)) => batch.events.push(event),
                        Some(None) => batch.unknown += 1,
                        None => batch.malformed += 1,
                    }
                }
            }
            Envelope::Rank => batch.rank = reader.lenient(|head| head.small())?,
            Envelope::Other => reader.skip(1)?,
        }
        Ok(())
    };
    match reader.head()? {
        Head::Array(count) => {
            for at in 0..count {
                let name = match at {
                    0 => Envelope::Time,
                    1 => Envelope::Events,
                    2 => Envelope::Rank,
                    _ => Envelope::Other,
                };
                field(&mut reader, name)?;
            }
        }
        Head::Map(count) => {
            for _ in 0..count {
                let name = match reader.name()? {
                    Some(b"ts") => Envelope::Time,
                    Some(b"events") => Envelope::Events,
                    Some(b"data_parallel_rank") => Envelope::Rank,
                    _ => Envelope::Other,
                };
                field(&mut reader, name)?;
            }
        }
        _ => return Err(WireError::NotABatch),
    }
    if time && events { Ok(batch) } else { Err(WireError::NotABatch) }
}

/// The fields of the envelope.
#[derive(Clone, Copy)]
enum Envelope {
    Time,
    Events,
    Rank,
    Other,
}

/// The fields of events that mean something here.
#[derive(Clone, Copy, PartialEq)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    /// A name in vLLM, a map with the cache salt in `SGLang`.
    LoraName,
    ExtraKeys,
    Group,
    Kind,
    Window,
    Other,
}

/// The fields of a stored event in the array layout, after its name.
const STORED: [Field; 11] = [
    Field::Hashes,
    Field::Parent,
    Field::Tokens,
    Field::BlockSize,
    Field::LoraId,
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::Group,
    Field::Kind,
    Field::Window,
];

/// The fields of a removed event in the array layout, after its name.
const REMOVED: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];

impl Field {
    fn named(name: &[u8]) -> Self {
        match name {
            b"block_hashes" => Self::Hashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"medium" => Self::Medium,
            b"lora_name" => Self::LoraName,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::Group,
            b"kv_cache_spec_kind" => Self::Kind,
            b"kv_cache_spec_sliding_window" => Self::Window,
            _ => Self::Other,
        }
    }
}

/// The types of events.
#[derive(Clone, Copy)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

impl Kind {
    fn named(name: &[u8]) -> Option<Self> {
        match name {
            b"BlockStored" => Some(Self::Stored),
            b"BlockRemoved" => Some(Self::Removed),
            b"AllBlocksCleared" => Some(Self::Cleared),
            _ => None,
        }
    }
}

/// Reads one event; `None` is one of a type not known here. On success all of it has been read.
fn event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>, Bad> {
    let mut draft = Draft::default();
    let kind = match reader.head()? {
        Head::Array(count) if count > 0 => {
            let Some(kind) = Kind::named(reader.head()?.text().ok_or(Bad::Event)?) else {
                reader.skip(u64::from(count - 1))?;
                return Ok(None);
            };
            let fields: &[Field] = match kind {
                Kind::Stored => &STORED,
                Kind::Removed => &REMOVED,
                Kind::Cleared => &[],
            };
            for at in 0..count - 1 {
                draft.read(fields.get(at as usize).copied().unwrap_or(Field::Other), reader)?;
            }
            kind
        }
        Head::Map(count) => {
            let name = reader.clone().type_of(count)?;
            let Some(kind) = Kind::named(name) else {
                reader.skip(2 * u64::from(count))?;
                return Ok(None);
            };
            for _ in 0..count {
                let field = reader.name()?.map_or(Field::Other, Field::named);
                draft.read(field, reader)?;
            }
            kind
        }
        _ => return Err(Bad::Event),
    };
    let event = match kind {
        Kind::Stored => KvEvent::Stored(draft.stored()?),
        Kind::Removed => KvEvent::Removed {
            hashes: draft.hashes.ok_or(Bad::Event)?,
            tier: draft.tier,
            group: draft.group,
        },
        Kind::Cleared => KvEvent::Cleared,
    };
    Ok(Some(event))
}

/// What has been read of an event.
#[derive(Default)]
struct Draft {
    hashes: Option<Vec<EngineHash>>,
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    block_size: u32,
    lora_id: Option<i64>,
    tier: Tier,
    lora_name: Option<Box<str>>,
    extra: Vec<(u32, Extra)>,
    group: u32,
    kind: Option<Attention>,
    window: Option<u32>,
    salt: Option<Box<str>>,
}

impl Draft {
    fn read(&mut self, field: Field, reader: &mut Reader<'_>) -> Result<(), Bad> {
        match field {
            Field::Hashes => self.hashes = Some(hashes(reader)?),
            // llm-d's simulator writes 0 for none.
            Field::Parent => self.parent = reader.head()?.hash()?.filter(|hash| hash.0 != 0),
            Field::Tokens => self.tokens = tokens(reader)?,
            Field::BlockSize => self.block_size = reader.lenient(|h| h.small())?.unwrap_or(0),
            Field::LoraId => self.lora_id = reader.lenient(|h| h.signed())?,
            Field::Medium => {
                self.tier = reader.lenient(|h| h.text().map(Tier::of))?.unwrap_or_default();
            }
            Field::LoraName => match reader.peek()? {
                Head::Map(_) => self.salt = salt(reader)?,
                _ => {
                    self.lora_name = reader.lenient(|h| h.owned())?.filter(|name| !name.is_empty());
                }
            },
            Field::ExtraKeys => self.extra = extra_keys(reader)?,
            Field::Group => self.group = reader.lenient(|h| h.small())?.unwrap_or(0),
            Field::Kind => {
                self.kind = reader.lenient(|h| h.text().map(attention))?;
            }
            Field::Window => self.window = reader.lenient(|h| h.small())?,
            Field::Other => reader.skip(1)?,
        }
        Ok(())
    }

    fn stored(mut self) -> Result<Stored, Bad> {
        let hashes = self.hashes.ok_or(Bad::Event)?;
        if !self.tokens.is_empty() {
            if self.block_size == 0 && !hashes.is_empty() {
                self.block_size = u32::try_from(self.tokens.len() / hashes.len()).unwrap_or(0);
            }
            if hashes.len().checked_mul(self.block_size as usize) != Some(self.tokens.len()) {
                return Err(Bad::Event);
            }
        }
        if let Some(name) = &self.lora_name {
            // It is in `adapter`; a request's own keys know it from there.
            self.extra.retain(|(_, extra)| !matches!(extra, Extra::Text(text) if text == name));
        }
        // SGLang repeats the salt with each event; it tells chains apart at their start, as vLLM sends it.
        if let (Some(salt), None) = (self.salt, self.parent) {
            self.extra.insert(0, (0, Extra::Text(salt)));
        }
        let adapter = self.lora_name.map(Adapter::Name).or(self.lora_id.map(Adapter::Id));
        let attention = match (self.kind, self.window) {
            (Some(Attention::Window(_)), window) => Attention::Window(window.unwrap_or(0)),
            (kind, _) => kind.unwrap_or_default(),
        };
        Ok(Stored {
            hashes,
            parent: self.parent,
            tokens: self.tokens,
            block_size: self.block_size,
            tier: self.tier,
            adapter,
            extra: self.extra,
            group: self.group,
            attention,
        })
    }
}

fn attention(kind: &[u8]) -> Attention {
    match kind {
        b"full_attention" | b"mla_attention" | b"sink_full_attention" => Attention::Whole,
        b"sliding_window" | b"sliding_window_mla" | b"chunked_local_attention" => {
            Attention::Window(0)
        }
        _ => Attention::Other,
    }
}

fn hashes(reader: &mut Reader<'_>) -> Result<Vec<EngineHash>, Bad> {
    let Head::Array(count) = reader.head()? else {
        return Err(Bad::Event);
    };
    let mut hashes = Vec::with_capacity((count as usize).min(reader.rest.len()));
    for _ in 0..count {
        hashes.push(reader.head()?.hash()?.ok_or(Bad::Event)?);
    }
    Ok(hashes)
}

fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, Bad> {
    let count = match reader.head()? {
        Head::Array(count) => count,
        Head::Nil => 0,
        _ => return Err(Bad::Event),
    };
    let mut tokens = Vec::with_capacity((count as usize).min(reader.rest.len()));
    for _ in 0..count {
        // Nearly all bytes of a busy engine are these: the three common forms first.
        let token = match *reader.rest {
            [0xcd, high, low, ref rest @ ..] => {
                reader.rest = rest;
                u32::from(u16::from_be_bytes([high, low]))
            }
            [0xce, a, b, c, d, ref rest @ ..] => {
                reader.rest = rest;
                u32::from_be_bytes([a, b, c, d])
            }
            [small @ 0..=0x7f, ref rest @ ..] => {
                reader.rest = rest;
                u32::from(small)
            }
            _ => reader.head()?.small().ok_or(Bad::Event)?,
        };
        tokens.push(token);
    }
    Ok(tokens)
}

/// A list with, for each block, nil or a list of values.
fn extra_keys(reader: &mut Reader<'_>) -> Result<Vec<(u32, Extra)>, Bad> {
    let Head::Array(blocks) = reader.peek()? else {
        reader.skip(1)?;
        return Ok(Vec::new());
    };
    reader.head()?;
    let mut extra = Vec::new();
    for block in 0..blocks {
        let count = match reader.peek()? {
            Head::Nil => {
                reader.head()?;
                continue;
            }
            Head::Array(count) => {
                reader.head()?;
                count
            }
            // One value without its list.
            _ => 1,
        };
        for _ in 0..count {
            if extra.len() == MAX_EXTRA {
                return Err(Bad::Event);
            }
            extra.push((block, extra_key(reader)?));
        }
    }
    Ok(extra)
}

fn extra_key(reader: &mut Reader<'_>) -> Result<Extra, Bad> {
    let start = reader.rest;
    let mut ahead = reader.clone();
    let known = match ahead.head()? {
        head @ Head::Str(_) => head.owned().map(Extra::Text),
        Head::Array(2) => {
            let (id, offset) = (ahead.head()?, ahead.head()?);
            id.owned().zip(offset.signed()).map(|(id, offset)| Extra::Item(id, offset))
        }
        _ => None,
    };
    if let Some(known) = known {
        *reader = ahead;
        return Ok(known);
    }
    reader.skip(1)?;
    Ok(Extra::Other(xxh3_64(&start[..start.len() - reader.rest.len()])))
}

/// The cache salt in the map that `SGLang` sends in place of an adapter's name.
fn salt(reader: &mut Reader<'_>) -> Result<Option<Box<str>>, Bad> {
    let Head::Map(count) = reader.head()? else {
        return Err(Bad::Event);
    };
    let mut salt = None;
    for _ in 0..count {
        if reader.name()? == Some(b"cache_salt") {
            salt = reader.lenient(|head| head.owned())?.filter(|salt| !salt.is_empty());
        } else {
            reader.skip(1)?;
        }
    }
    Ok(salt)
}

/// Why an event cannot be read.
enum Bad {
    /// Its own fault: what comes after it can be read.
    Event,
    /// The payload's.
    Payload(WireError),
}

impl From<WireError> for Bad {
    fn from(error: WireError) -> Self {
        Self::Payload(error)
    }
}

/// The start of a value: all of it, or how many values come in it.
#[derive(Clone, Copy)]
enum Head<'a> {
    Nil,
    Unsigned(u64),
    /// Below zero.
    Negative(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(u32),
    Map(u32),
    /// A truth value or an extension.
    Other,
}

impl<'a> Head<'a> {
    fn float(self) -> Option<f64> {
        match self {
            Self::Float(float) => Some(float),
            #[expect(clippy::cast_precision_loss, reason = "a time in whole seconds")]
            Self::Unsigned(number) => Some(number as f64),
            _ => None,
        }
    }

    fn small(self) -> Option<u32> {
        match self {
            Self::Unsigned(number) => u32::try_from(number).ok(),
            _ => None,
        }
    }

    fn signed(self) -> Option<i64> {
        match self {
            Self::Unsigned(number) => i64::try_from(number).ok(),
            Self::Negative(number) => Some(number),
            _ => None,
        }
    }

    fn text(self) -> Option<&'a [u8]> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    fn owned(self) -> Option<Box<str>> {
        std::str::from_utf8(self.text()?).ok().map(Box::from)
    }

    /// The hash of a block, or nil.
    fn hash(self) -> Result<Option<EngineHash>, Bad> {
        match self {
            Self::Nil => Ok(None),
            Self::Unsigned(number) => Ok(Some(EngineHash(number))),
            Self::Negative(number) => Ok(Some(EngineHash(number.cast_unsigned()))),
            Self::Bin(bytes) | Self::Str(bytes) => Ok(Some(EngineHash::of_bytes(bytes))),
            _ => Err(Bad::Event),
        }
    }
}

/// What has not been read yet.
#[derive(Clone)]
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.bytes().map(u32::from_be_bytes)
    }

    fn head(&mut self) -> Result<Head<'a>, WireError> {
        let signed = |number: i64| match u64::try_from(number) {
            Ok(number) => Head::Unsigned(number),
            Err(_) => Head::Negative(number),
        };
        Ok(match Marker::from_u8(self.u8()?) {
            Marker::FixPos(number) => Head::Unsigned(number.into()),
            Marker::FixNeg(number) => Head::Negative(number.into()),
            Marker::U8 => Head::Unsigned(self.u8()?.into()),
            Marker::U16 => Head::Unsigned(self.u16()?.into()),
            Marker::U32 => Head::Unsigned(self.u32()?.into()),
            Marker::U64 => Head::Unsigned(u64::from_be_bytes(self.bytes()?)),
            Marker::I8 => signed(i8::from_be_bytes(self.bytes()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.bytes()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.bytes()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.bytes()?)),
            Marker::F32 => Head::Float(f32::from_be_bytes(self.bytes()?).into()),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.bytes()?)),
            Marker::Null => Head::Nil,
            Marker::True | Marker::False => Head::Other,
            Marker::FixStr(count) => Head::Str(self.take(count.into())?),
            Marker::Str8 => self.sized::<1>().map(Head::Str)?,
            Marker::Str16 => self.sized::<2>().map(Head::Str)?,
            Marker::Str32 => self.sized::<4>().map(Head::Str)?,
            Marker::Bin8 => self.sized::<1>().map(Head::Bin)?,
            Marker::Bin16 => self.sized::<2>().map(Head::Bin)?,
            Marker::Bin32 => self.sized::<4>().map(Head::Bin)?,
            Marker::FixArray(count) => Head::Array(count.into()),
            Marker::Array16 => Head::Array(self.u16()?.into()),
            Marker::Array32 => Head::Array(self.u32()?),
            Marker::FixMap(count) => Head::Map(count.into()),
            Marker::Map16 => Head::Map(self.u16()?.into()),
            Marker::Map32 => Head::Map(self.u32()?),
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => {
                let count = self.u8()?.into();
                self.extension(count)?
            }
            Marker::Ext16 => {
                let count = self.u16()?.into();
                self.extension(count)?
            }
            Marker::Ext32 => {
                let count = self.u32()? as usize;
                self.extension(count)?
            }
            Marker::Reserved => return Err(WireError::NotMsgpack),
        })
    }

    /// Bytes after their count, which has `N` bytes.
    fn sized<const N: usize>(&mut self) -> Result<&'a [u8], WireError> {
        let count =
            self.bytes::<N>()?.iter().fold(0, |count, byte| count << 8 | usize::from(*byte));
        self.take(count)
    }

    /// The type byte and the data of an extension.
    fn extension(&mut self, count: usize) -> Result<Head<'a>, WireError> {
        self.u8()?;
        self.take(count)?;
        Ok(Head::Other)
    }

    fn peek(&self) -> Result<Head<'a>, WireError> {
        self.clone().head()
    }

    /// Passes over `values` values with all that is in them, however deep.
    fn skip(&mut self, values: u64) -> Result<(), WireError> {
        let mut left = values;
        while left > 0 {
            left -= 1;
            left = left.saturating_add(match self.head()? {
                Head::Array(count) => count.into(),
                Head::Map(count) => 2 * u64::from(count),
                _ => 0,
            });
        }
        Ok(())
    }

    /// Reads a value for what `wanted` makes of it, and passes over it if that is nothing.
    fn lenient<T>(
        &mut self,
        wanted: impl FnOnce(Head<'a>) -> Option<T>,
    ) -> Result<Option<T>, WireError> {
        let head = self.peek()?;
        self.skip(1)?;
        Ok(wanted(head))
    }

    /// Reads the key of a map, if it is a text.
    fn name(&mut self) -> Result<Option<&'a [u8]>, WireError> {
        self.lenient(Head::text)
    }

    /// Finds the type among the `count` entries of a map.
    fn type_of(&mut self, count: u32) -> Result<&'a [u8], Bad> {
        for _ in 0..count {
            if self.name()? == Some(b"type") {
                return self.head()?.text().ok_or(Bad::Event);
            }
            self.skip(1)?;
        }
        Err(Bad::Event)
    }

    /// Reads a value with `read`; when that is at fault with it, passes over all of it.
    fn isolated<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Bad>,
    ) -> Result<Option<T>, WireError> {
        let start = self.clone();
        match read(self) {
            Ok(value) => Ok(Some(value)),
            Err(Bad::Payload(error)) => Err(error),
            Err(Bad::Event) => {
                *self = start;
                self.skip(1)?;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests;
