//! Charts as SVG, and the same pictures as PNG with a font of their own: no font of the system has a part in it.
//!
//! Colours are those of Okabe and Ito, which colour-blind people tell apart, and differ in dashes too; the heat map
//! goes from light to dark and has its numbers in it.

use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, Result};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontTransform, RGBColor, ShapeStyle, TextStyle};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg;

use crate::report::plain;
use crate::stats::Interval;

/// Verdana's letters are as wide, where a viewer does not have the first.
const FONT: &str = "DejaVu Sans, Verdana, sans-serif";
/// Pixels of a PNG for each of its SVG.
const SCALE: f32 = 2.0;
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0x66, 0x66, 0x66);
const GRID: RGBColor = RGBColor(0xe2, 0xe2, 0xe2);
const OURS: RGBColor = RGBColor(0x00, 0x00, 0x00);
const COLOURS: [RGBColor; 7] = [
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x8c, 0x8c, 0x8c),
];
/// Lengths of a stroke and of the gap after it; no gap is a whole line.
const DASHES: [(i32, i32); 3] = [(1, 0), (7, 4), (2, 3)];
/// The heat map's colours, from a ratio of 1 to `HOTTEST`.
const HEAT: [RGBColor; 5] = [
    RGBColor(0xff, 0xfb, 0xe6),
    RGBColor(0xfe, 0xd9, 0x76),
    RGBColor(0xf5, 0x94, 0x2c),
    RGBColor(0xb8, 0x45, 0x0b),
    RGBColor(0x5a, 0x1f, 0x07),
];
const BAR: RGBColor = RGBColor(0x9d, 0xc3, 0xe2);
const BEST: RGBColor = RGBColor(0xbf, 0xdd, 0xf2);
const HOTTEST: f64 = 5.0;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A picture.
#[derive(Debug)]
pub(crate) struct Chart {
    svg: String,
}

/// A policy's line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) look: Look,
}

/// How a policy looks, on all charts of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// The policy that the report is about.
    Ours,
    /// One of the others, by its number.
    Other(usize),
}

/// A policy's bar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: Interval,
    pub(crate) look: Look,
}

impl Chart {
    pub(crate) fn svg(&self) -> &[u8] {
        self.svg.as_bytes()
    }

    pub(crate) fn png(&self) -> Result<Vec<u8>> {
        let options = usvg::Options { fontdb: fonts(), ..usvg::Options::default() };
        let tree = usvg::Tree::from_str(&self.svg, &options)?;
        let size = tree.size().to_int_size().scale_by(SCALE).context("a picture without a size")?;
        let mut pixels =
            Pixmap::new(size.width(), size.height()).context("a picture without a size")?;
        resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
        Ok(pixels.encode_png()?)
    }
}

fn fonts() -> Arc<usvg::fontdb::Database> {
    static FONTS: OnceLock<Arc<usvg::fontdb::Database>> = OnceLock::new();
    let load = || {
        let mut fonts = usvg::fontdb::Database::new();
        fonts.load_font_data(dejavu::sans::regular().to_vec());
        fonts.load_font_data(dejavu::sans::bold().to_vec());
        Arc::new(fonts)
    };
    Arc::clone(FONTS.get_or_init(load))
}

/// Hit rate over time; points are seconds and shares.
pub(crate) fn hit_rate(workload: &str, lines: &[Line], scaled_at: Option<f64>) -> Result<Chart> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let end = points().map(|point| point.0).fold(1.0, f64::max);
    let axes = Axes {
        title: format!("{workload}: prompt tokens found in a cache"),
        x: "time of sending, s",
        y: "hit rate, %",
        marked: scaled_at.map(|at| (at, "pool changes".to_owned())),
    };
    let mut lines = lines.to_vec();
    let average = |line: &Line| {
        line.points.iter().map(|point| point.1).sum::<f64>() / line.points.len().max(1) as f64
    };
    lines.sort_by(|a, b| average(b).total_cmp(&average(a)));
    line_chart(&axes, 0.0..end * 1.01, &lines)
}

/// Distributions of the time to the first token; points are seconds and shares of all requests.
pub(crate) fn ttft(workload: &str, lines: &[Line], slo: f64) -> Result<Chart> {
    let times =
        || lines.iter().flat_map(|line| &line.points).map(|point| point.0.max(1e-3)).chain([slo]);
    let (least, most) = (times().fold(slo, f64::min), times().fold(slo, f64::max));
    let axes = Axes {
        title: format!("{workload}: time to the first token"),
        x: "TTFT, s (logarithmic)",
        y: "requests that had it by then, %",
        marked: Some((slo, format!("SLO {} s", short(slo)))),
    };
    let mut lines = lines.to_vec();
    let median = |line: &Line| {
        line.points.iter().find(|point| point.1 >= 0.5).map_or(f64::INFINITY, |point| point.0)
    };
    lines.sort_by(|a, b| median(a).total_cmp(&median(b)));
    let range = least * 0.9..most * 1.1;
    let ticks = log_ticks(range.start, range.end);
    line_chart(&axes, range.log_scale().with_key_points(ticks), &lines)
}

/// Goodput by the time to the first token that is asked for; points are seconds and shares.
pub(crate) fn goodput(workload: &str, lines: &[Line], slo: f64) -> Result<Chart> {
    let times = || lines.iter().flat_map(|line| &line.points).map(|point| point.0).chain([slo]);
    let (least, most) = (times().fold(slo, f64::min), times().fold(slo, f64::max));
    let axes = Axes {
        title: format!("{workload}: requests within the SLO"),
        x: "time to the first token that is asked for, s (logarithmic)",
        y: "goodput, %",
        marked: Some((slo, format!("SLO {} s", short(slo)))),
    };
    let mut lines = lines.to_vec();
    let average = |line: &Line| line.points.iter().map(|point| point.1).sum::<f64>();
    lines.sort_by(|a, b| average(b).total_cmp(&average(a)));
    let range = least * 0.9..most * 1.1;
    let ticks = log_ticks(range.start, range.end);
    line_chart(&axes, range.log_scale().with_key_points(ticks), &lines)
}

#[derive(Debug)]
struct Axes {
    title: String,
    x: &'static str,
    y: &'static str,
    /// A place on the x axis, and what it is.
    marked: Option<(f64, String)>,
}

/// Lines over an x axis, shares in percent on the y axis, and the legend on the right in the lines' order.
fn line_chart<X>(axes: &Axes, x: X, lines: &[Line]) -> Result<Chart>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
{
    const HEIGHT: u32 = 430;
    const PLOT: i32 = 620;
    let legend = 56 + widest(lines.iter().map(|line| line.name.as_str()), 12.0);
    let height = HEIGHT.max(80 + 20 * u32::try_from(lines.len())?);
    draw((u32::try_from(PLOT + legend)?, height), |area| {
        area.draw(&text(&axes.title, (16, 20), bold(15.0)))?;
        let (plot, legend) = area.split_horizontally(PLOT);
        let mut chart = ChartBuilder::on(&plot)
            .margin_top(54)
            .margin_right(12)
            .margin_bottom(6)
            .margin_left(14)
            .x_label_area_size(44)
            .y_label_area_size(52)
            .build_cartesian_2d(x, 0.0..1.0)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(FAINT)
            .x_desc(axes.x)
            .y_desc(axes.y)
            .axis_desc_style(regular(12.0))
            .label_style(regular(11.0))
            .x_label_formatter(&|value| short(*value))
            .y_label_formatter(&|share: &f64| format!("{:.0}", *share * 100.0))
            .y_labels(6)
            .draw()?;
        if let Some((at, label)) = &axes.marked {
            let place = chart.backend_coord(&(*at, 1.0));
            chart.draw_series(DashedLineSeries::new(
                [(*at, 0.0), (*at, 1.0)],
                3,
                4,
                ShapeStyle::from(FAINT),
            ))?;
            area.draw(&text(label, (place.0, place.1 - 9), centred(11.0)))?;
        }
        for line in lines.iter().rev() {
            let points = line.points.iter().copied();
            match dashes(line.look) {
                (_, 0) => chart.draw_series(LineSeries::new(points, stroke(line.look)))?,
                (dash, gap) => chart.draw_series(DashedLineSeries::new(
                    points,
                    dash,
                    gap,
                    stroke(line.look),
                ))?,
            };
        }
        for (at, line) in (0i32..).zip(lines) {
            key(&legend, line, 64 + 20 * at)?;
        }
        Ok(())
    })
}

/// A line of the legend.
fn key(area: &Area<'_>, line: &Line, y: i32) -> Result<()> {
    let (dash, gap) = dashes(line.look);
    let mut x = 6;
    while x < 34 {
        let end = if gap == 0 { 34 } else { (x + dash).min(34) };
        area.draw(&PathElement::new([(x, y), (end, y)], stroke(line.look)))?;
        x = end + gap.max(1);
    }
    let style = if line.look == Look::Ours { bold(12.0) } else { regular(12.0) };
    area.draw(&text(&line.name, (42, y), style))?;
    Ok(())
}

/// The busiest endpoint's work over the mean, a bar a policy from 1 on.
pub(crate) fn imbalance(workload: &str, bars: &[Bar]) -> Result<Chart> {
    const ROW: i32 = 24;
    const TOP: i32 = 46;
    const PLOT: i32 = 420;
    let left = 24 + widest(bars.iter().map(|bar| bar.name.as_str()), 12.0);
    let bottom = TOP + ROW * i32::try_from(bars.len())?;
    let most = bars.iter().map(|bar| bar.value.hi).fold(1.0, f64::max);
    let ticks = ticks(1.0, most);
    let end = ticks.last().copied().unwrap_or(2.0);
    let x = |value: f64| left + pixels((value - 1.0) / (end - 1.0) * f64::from(PLOT));
    draw((u32::try_from(left + PLOT + 70)?, u32::try_from(bottom + 52)?), |area| {
        area.draw(&text(&format!("{workload}: imbalance"), (16, 20), bold(15.0)))?;
        for tick in ticks {
            area.draw(&PathElement::new([(x(tick), TOP), (x(tick), bottom)], GRID))?;
            area.draw(&text(&short(tick), (x(tick), bottom + 12), centred(11.0)))?;
        }
        for (at, bar) in (0..).zip(bars) {
            let y = TOP + ROW * at;
            let Interval { mean, lo, hi } = bar.value;
            let style = if bar.look == Look::Ours { bold(12.0) } else { regular(12.0) };
            area.draw(&text(
                &bar.name,
                (left - 8, y + ROW / 2),
                style.pos(Pos::new(HPos::Right, VPos::Center)),
            ))?;
            let fill = if bar.look == Look::Ours { OURS } else { BAR };
            area.draw(&Rectangle::new([(left, y + 4), (x(mean), y + ROW - 4)], fill.filled()))?;
            if lo < hi {
                let whisker = [(x(lo), y + ROW / 2), (x(hi), y + ROW / 2)];
                area.draw(&PathElement::new(whisker, WHITE.stroke_width(5)))?;
                area.draw(&PathElement::new(whisker, INK.stroke_width(2)))?;
            }
            let value = format!("{mean:.2}");
            area.draw(&text(&value, (x(hi.max(mean)) + 8, y + ROW / 2), regular(11.0)))?;
        }
        area.draw(&PathElement::new([(left, TOP), (left, bottom)], FAINT))?;
        let axis = "busiest endpoint's computed seconds over the mean (1 is even)";
        area.draw(&text(axis, (left + PLOT / 2, bottom + 36), centred(12.0)))?;
        Ok(())
    })
}

/// One policy against others: a geometric mean of ratios each, with its interval; below 1 the policy is better.
pub(crate) fn against(policy: &str, metric: &str, rows: &[(String, [f64; 3])]) -> Result<Chart> {
    const ROW: i32 = 24;
    const TOP: i32 = 62;
    const PLOT: i32 = 460;
    let left = 24 + widest(rows.iter().map(|(name, _)| name.as_str()), 12.0);
    let bottom = TOP + ROW * i32::try_from(rows.len())?;
    let ends = || rows.iter().flat_map(|(_, ratio)| ratio.iter().copied());
    let (least, most) = (ends().fold(0.5, f64::min) * 0.95, ends().fold(1.5, f64::max) * 1.05);
    let x =
        |value: f64| left + pixels((value / least).ln() / (most / least).ln() * f64::from(PLOT));
    draw((u32::try_from(left + PLOT + 160)?, u32::try_from(bottom + 52)?), |area| {
        let title = format!("{policy} against others: {metric}");
        area.draw(&text(&title, (16, 20), bold(15.0)))?;
        for tick in [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0] {
            if (least..=most).contains(&tick) {
                area.draw(&PathElement::new([(x(tick), TOP), (x(tick), bottom)], GRID))?;
                area.draw(&text(&short(tick), (x(tick), bottom + 12), centred(11.0)))?;
            }
        }
        let even = [(x(1.0), TOP - 4), (x(1.0), bottom)];
        area.draw(&PathElement::new(even, INK.stroke_width(1)))?;
        let side = |place: HPos| regular(11.0).pos(Pos::new(place, VPos::Center));
        let better = format!("{policy} is better");
        area.draw(&text(&better, (x(1.0) - 8, TOP - 14), side(HPos::Right)))?;
        area.draw(&text("worse", (x(1.0) + 8, TOP - 14), side(HPos::Left)))?;
        for (at, (name, [mean, lo, hi])) in (0..).zip(rows) {
            let y = TOP + ROW * at + ROW / 2;
            let style = regular(12.0).pos(Pos::new(HPos::Right, VPos::Center));
            area.draw(&text(name, (left - 8, y), style))?;
            let colour = COLOURS[usize::from(*mean <= 1.0)];
            area.draw(&PathElement::new([(x(*lo), y), (x(*hi), y)], colour.stroke_width(2)))?;
            area.draw(&Circle::new((x(*mean), y), 4, colour.filled()))?;
            let value = format!("{mean:.2} [{lo:.2}, {hi:.2}]");
            area.draw(&text(&value, (left + PLOT + 12, y), regular(11.0)))?;
        }
        let axis = "geometric mean of the ratios over workloads, 95 % by bootstrap";
        area.draw(&text(axis, (left + PLOT / 2, bottom + 36), centred(12.0)))?;
        Ok(())
    })
}

/// Ratios to the best policy of each workload; `cells` are by workload, then by policy.
pub(crate) fn ratios(
    title: &str,
    workloads: &[&str],
    policies: &[&str],
    cells: &[Vec<Option<f64>>],
) -> Result<Chart> {
    const CELL: (i32, i32) = (54, 24);
    let left = 24 + widest(workloads.iter().copied(), 12.0);
    let top = 44 + widest(policies.iter().copied(), 12.0);
    let (columns, rows) = (i32::try_from(policies.len())?, i32::try_from(workloads.len())?);
    let (right, bottom) = (left + CELL.0 * columns, top + CELL.1 * rows);
    let corner = |column: i32, row: i32| (left + CELL.0 * column, top + CELL.1 * row);
    // Enough for the title and for the legend's own height.
    let (width, height) = ((right + 84).max(470), (bottom + 20).max(top + 210));
    draw((u32::try_from(width)?, u32::try_from(height)?), |area| {
        area.draw(&text(title, (16, 20), bold(15.0)))?;
        for (column, policy) in (0..).zip(policies) {
            let (x, y) = corner(column, 0);
            let upright = regular(12.0).transform(FontTransform::Rotate270);
            area.draw(&text(policy, (x + CELL.0 / 2, y - 8), upright))?;
        }
        for ((row, workload), ratios) in (0..).zip(workloads).zip(cells) {
            let (x, y) = corner(0, row);
            let style = regular(12.0).pos(Pos::new(HPos::Right, VPos::Center));
            area.draw(&text(workload, (x - 8, y + CELL.1 / 2), style))?;
            for (column, ratio) in (0..).zip(ratios) {
                cell(area, corner(column, row), CELL, *ratio)?;
            }
        }
        heat_legend(area, (right + 18, top))
    })
}

fn cell(
    area: &Area<'_>,
    (x, y): (i32, i32),
    (width, height): (i32, i32),
    ratio: Option<f64>,
) -> Result<()> {
    let shown = ratio.map_or_else(|| "–".to_owned(), ratio_text);
    // What reads as 1.00 is as good as the best.
    let best = shown == "1.00";
    let fill = ratio.map_or(WHITE, |ratio| if best { BEST } else { heat(ratio) });
    area.draw(&Rectangle::new([(x + 1, y + 1), (x + width, y + height)], fill.filled()))?;
    let style = if best { bold(11.0) } else { regular(11.0) };
    let ink = if dark(fill) { WHITE } else { INK };
    let style = style.color(&ink).pos(Pos::new(HPos::Center, VPos::Center));
    area.draw(&text(&shown, (x + width / 2, y + height / 2), style))?;
    Ok(())
}

fn heat_legend(area: &Area<'_>, (x, y): (i32, i32)) -> Result<()> {
    const HEIGHT: i32 = 130;
    area.draw(&Rectangle::new([(x, y), (x + 14, y + 14)], BEST.filled()))?;
    area.draw(&text("best", (x + 20, y + 7), regular(11.0)))?;
    let y = y + 30;
    let place = |ratio: f64| y + pixels(ratio.ln() / HOTTEST.ln() * f64::from(HEIGHT));
    for step in 0..HEIGHT {
        let ratio = HOTTEST.powf(f64::from(step) / f64::from(HEIGHT));
        area.draw(&Rectangle::new([(x, y + step), (x + 14, y + step + 1)], heat(ratio).filled()))?;
    }
    for ratio in [1.0, 1.5, 2.0, 3.0, HOTTEST] {
        let label = if ratio < HOTTEST { format!("× {ratio}") } else { format!("≥ {ratio}") };
        area.draw(&text(&label, (x + 20, place(ratio)), regular(11.0)))?;
    }
    Ok(())
}

fn ratio_text(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.2}") } else { plain(ratio, 3) }
}

fn heat(ratio: f64) -> RGBColor {
    let place = (ratio.max(1.0).ln() / HOTTEST.ln()).min(1.0) * (HEAT.len() - 1) as f64;
    let at = crate::metrics::whole(place).min(HEAT.len() - 2);
    let part = place - at as f64;
    let mix = |from: u8, to: u8| {
        let value = f64::from(from) + (f64::from(to) - f64::from(from)) * part;
        u8::try_from(crate::metrics::whole(value.round())).unwrap_or(u8::MAX)
    };
    let (from, to) = (HEAT[at], HEAT[at + 1]);
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

fn dark(RGBColor(red, green, blue): RGBColor) -> bool {
    0.299 * f64::from(red) + 0.587 * f64::from(green) + 0.114 * f64::from(blue) < 140.0
}

fn draw(size: (u32, u32), with: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<Chart> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    area.fill(&WHITE)?;
    with(&area)?;
    area.present()?;
    drop(area);
    // Said once and not with each word: a big table of numbers is half as long.
    let font = format!(" font-family=\"{FONT}\"");
    let svg = svg.replace(&font, "").replace(" opacity=\"1\"", "");
    Ok(Chart { svg: svg.replacen("<svg", &format!("<svg{font}"), 1) })
}

fn text<'a>(text: &'a str, at: (i32, i32), style: TextStyle<'a>) -> Text<'a, (i32, i32), &'a str> {
    Text::new(text, at, style)
}

fn regular(size: f64) -> TextStyle<'static> {
    styled(size, FontStyle::Normal)
}

fn bold(size: f64) -> TextStyle<'static> {
    styled(size, FontStyle::Bold)
}

fn centred(size: f64) -> TextStyle<'static> {
    regular(size).pos(Pos::new(HPos::Center, VPos::Center))
}

fn styled(size: f64, style: FontStyle) -> TextStyle<'static> {
    // The crate takes a line's height for a font's size.
    let font = (FONT, size * 1.24, style).into_font();
    TextStyle::from(font).color(&INK).pos(Pos::new(HPos::Left, VPos::Center))
}

fn stroke(look: Look) -> ShapeStyle {
    colour(look).stroke_width(if look == Look::Ours { 3 } else { 2 })
}

fn colour(look: Look) -> RGBColor {
    match look {
        Look::Ours => OURS,
        Look::Other(number) => COLOURS[number % COLOURS.len()],
    }
}

fn dashes(look: Look) -> (i32, i32) {
    match look {
        Look::Ours => DASHES[0],
        Look::Other(number) => DASHES[number / COLOURS.len() % DASHES.len()],
    }
}

/// About the pixels that the longest of some names takes.
fn widest<'a>(names: impl Iterator<Item = &'a str>, size: f64) -> i32 {
    let letters = names.map(|name| name.chars().count()).max().unwrap_or(0);
    pixels(letters as f64 * size * 0.58)
}

fn pixels(length: f64) -> i32 {
    #[expect(clippy::cast_possible_truncation, reason = "a picture is smaller")]
    let pixels = length.round() as i32;
    pixels
}

/// Ones, twos and fives; ones alone if that is too many.
fn log_ticks(from: f64, to: f64) -> Vec<f64> {
    let ticks = |steps: &[f64]| -> Vec<f64> {
        let decades = (-4..7).map(|exponent| 10f64.powi(exponent));
        decades
            .flat_map(|decade| steps.iter().map(move |step| step * decade))
            .filter(|at| (from..=to).contains(at))
            .collect()
    };
    let all = ticks(&[1.0, 2.0, 5.0]);
    if all.len() <= 12 { all } else { ticks(&[1.0]) }
}

/// Round steps from `from` to the first beyond `to`.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    let rough = ((to - from) / 5.0).max(0.01);
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|by| by * decade)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    let mut ticks = vec![from];
    while ticks.last().is_some_and(|last| *last < to || ticks.len() < 3) {
        ticks.push(from + step * ticks.len() as f64);
    }
    ticks
}

/// A number without the digits that say nothing.
pub(crate) fn short(value: f64) -> String {
    ((value * 1e4).round() / 1e4).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(count: usize) -> Vec<Line> {
        let line = |number: usize| Line {
            name: format!("policy-{number}"),
            points: (0..=50)
                .map(|step| (0.05 * (number + step + 1) as f64, step as f64 / 50.0))
                .collect(),
            look: if number == 0 { Look::Ours } else { Look::Other(number - 1) },
        };
        (0..count).map(line).collect()
    }

    fn has(chart: &Chart, text: &str) -> bool {
        chart.svg.contains(&format!(">\n{text}\n<"))
    }

    #[test]
    fn a_png_is_its_svg_at_twice_the_size() {
        let chart = ttft("chat:96", &lines(2), 0.5).unwrap();
        let size = |side: &str| -> u32 {
            let from = chart.svg.find(&format!("{side}=\"")).unwrap() + side.len() + 2;
            chart.svg[from..].split('"').next().unwrap().parse().unwrap()
        };
        let png = chart.png().unwrap();
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(&png[16..20], (2 * size("width")).to_be_bytes());
        assert_eq!(&png[20..24], (2 * size("height")).to_be_bytes());
    }

    #[test]
    fn text_is_in_the_png_without_any_font_of_the_system() {
        let inked = |with: &str| {
            let chart =
                draw((200, 40), |area| Ok(area.draw(&text(with, (10, 20), regular(14.0)))?))
                    .unwrap();
            Pixmap::decode_png(&chart.png().unwrap())
                .unwrap()
                .pixels()
                .iter()
                .filter(|pixel| pixel.red() < 128)
                .count()
        };
        assert_eq!(inked(" "), 0);
        assert!(inked("TTFT × ≥ –") > 200);
    }

    #[test]
    fn axes_have_names_and_units() {
        let chart = ttft("chat:96", &lines(3), 0.5).unwrap();
        for text in [
            "chat:96: time to the first token",
            "TTFT, s (logarithmic)",
            "SLO 0.5 s",
            "0.5",
            "100",
            "policy-2",
        ] {
            assert!(has(&chart, text), "{text}");
        }
        let chart = hit_rate("chat:96", &lines(3), Some(1.0)).unwrap();
        for text in ["time of sending, s", "hit rate, %", "pool changes"] {
            assert!(has(&chart, text), "{text}");
        }
        assert!(!has(&hit_rate("chat:96", &lines(3), None).unwrap(), "pool changes"));
        let chart = goodput("chat:96", &lines(3), 0.5).unwrap();
        for text in ["chat:96: requests within the SLO", "goodput, %", "SLO 0.5 s"] {
            assert!(has(&chart, text), "{text}");
        }
    }

    #[test]
    fn looks_differ() {
        let looks: Vec<(RGBColor, (i32, i32))> = std::iter::once(Look::Ours)
            .chain((0..21).map(Look::Other))
            .map(|look| (colour(look), dashes(look)))
            .collect();
        for (at, look) in looks.iter().enumerate() {
            assert!(!looks[..at].contains(look), "{at}");
        }
    }

    #[test]
    fn ratios_have_their_numbers_and_what_is_unknown_has_none() {
        let cells = [vec![Some(1.0), Some(1.004), None], vec![Some(2.5), Some(1.0), Some(123.4)]];
        let chart = ratios("Ratios", &["chat:96", "conv:1.0"], &["a", "b", "c"], &cells).unwrap();
        for text in ["1.00", "2.50", "123", "–", "conv:1.0", "b"] {
            assert!(has(&chart, text), "{text}");
        }
        assert_eq!(chart.svg.matches(">\n1.00\n<").count(), 3);
    }

    #[test]
    fn a_policy_against_others_shows_every_interval() {
        let rows = [("gaie".to_owned(), [0.8, 0.6, 1.1]), ("dynamo".to_owned(), [1.2, 0.3, 2.5])];
        let chart = against("ours", "TTFT mean", &rows).unwrap();
        for text in
            ["ours against others: TTFT mean", "ours is better", "gaie", "1.20 [0.30, 2.50]", "0.3"]
        {
            assert!(has(&chart, text), "{text}");
        }
        assert!(against("ours", "TTFT mean", &[]).is_ok());
    }

    #[test]
    fn heat_only_darkens() {
        let light = |ratio| {
            let RGBColor(red, green, blue) = heat(ratio);
            0.299 * f64::from(red) + 0.587 * f64::from(green) + 0.114 * f64::from(blue)
        };
        let lights: Vec<f64> = (0..60).map(|step| light(1.0 + 0.1 * f64::from(step))).collect();
        assert!(lights.is_sorted_by(|a, b| a >= b), "{lights:?}");
        assert_eq!(heat(0.5), HEAT[0]);
        assert_eq!(heat(1e9), HEAT[4]);
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(log_ticks(0.07, 3.0), [0.1, 0.2, 0.5, 1.0, 2.0]);
        assert_eq!(log_ticks(0.009, 2000.0), [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]);
        let read = |from, to| ticks(from, to).into_iter().map(short).collect::<Vec<_>>();
        assert_eq!(read(1.0, 1.36), ["1", "1.1", "1.2", "1.3", "1.4"]);
        assert_eq!(read(1.0, 1.0), ["1", "1.01", "1.02"]);
        assert_eq!(read(1.0, 3.9), ["1", "2", "3", "4"]);
    }

    #[test]
    fn nothing_to_draw_is_drawn() {
        assert!(hit_rate("chat:96", &[], None).is_ok());
        assert!(imbalance("chat:96", &[]).is_ok() && goodput("chat:96", &[], 1.0).is_ok());
        assert!(ratios("Ratios", &[], &[], &[]).is_ok());
    }
}
