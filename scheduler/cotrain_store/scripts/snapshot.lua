-- snapshot: register a complete file as the run's new base. The previous file stays registered, and the log is cut
-- only up to its seq. If the newest file is lost, replay takes longer but is possible.
-- Fenced by the worker's epoch. The base never moves past the last commit, never backwards, and never past a save
-- with unstored weights, because only the log can recreate them.
-- needs: fence, log_cut, run_bytes
local prefix, run, seq, file = args.prefix, args.run, args.seq, args.file
local log = prefix .. 'log:' .. run

local row = redis.call('HMGET', log, 'snap', 'done', 'snapfile', 'snapsha', 'oldsnap', 'numerics', 'rewound')
local snap, done = tonumber(row[1] or -1), tonumber(row[2] or -1)
if not row[1] or seq < 0 or seq < snap or seq > done or seq < tonumber(row[7] or -1) then
  return 'OUTDATED'
end
if seq == snap then -- the same state: this file replaces a lost one
  if file == row[3] then
    return 'OUTDATED'
  end
  redis.call('HSET', log, 'snapfile', file, 'snapsha', args.sha256)
  return 'OK'
end
for covered = snap + 1, seq do
  if redis.call('HGET', 'cotrain:weights:' .. run .. ':' .. covered, 'digest') == '' then
    return 'UNSTORED'
  end
end
record_copy(log, args.size)
cut_log(prefix, run, tonumber(row[5] or -1) + 1, snap, args.digests_kept)
redis.call('HSET', log, 'snap', seq, 'snapfile', file, 'snapsha', args.sha256, 'oldsnap', snap,
  'oldfile', row[3] or '', 'oldsha', row[4] or '', 'oldnumerics', row[6] or '')
if seq == done then
  redis.call('HDEL', log, 'numerics') -- nothing is left to replay: the next commit sets it again
end
return 'OK'
