-- roll_back: continue a run whose newest state is lost from a file with an older state, as of `done`.
-- Ops accepted and not committed were meant for the lost state, so they fail. Later ops run.
-- Fenced by the worker's epoch. Idempotent.
-- needs: fence, log_cut, reject, changed, history
-- `args.steps` has each open step with ops of the run: its cycle, and the step before and after this change.
local prefix, run, done, weights_epoch = args.prefix, args.run, args.done, args.weights_epoch
local log, open = prefix .. 'log:' .. run, prefix .. 'open:' .. args.worker

local row = redis.call('HMGET', log, 'done', 'last', 'oldsnap', 'epoch')
if tonumber(row[4] or 0) == weights_epoch then
  return 'OK'
end
if tonumber(row[1] or -1) ~= done or tonumber(row[4] or 0) ~= weights_epoch - 1 then
  return 'OUTDATED'
end
for _, step in ipairs(args.steps) do
  if redis.call('HGET', open, step.cycle) ~= step.before then
    return 'OUTDATED'
  end
end

for _, step in ipairs(args.steps) do
  redis.call('HSET', open, step.cycle, step.after)
end
local resolved = {}
for seq = done + 1, tonumber(row[2]) do
  reject(prefix, run, args.tenant, seq, args.failure, resolved)
end
cut_log(prefix, run, tonumber(row[3] or -1) + 1, done, args.digests_kept)
redis.call('HSET', log, 'snap', done, 'snapfile', args.file, 'snapsha', args.sha256, 'oldsnap', done,
  'oldfile', '', 'oldsha', '', 'epoch', weights_epoch, 'rolled_back_to', args.path)
redis.call('HDEL', log, 'numerics', 'oldnumerics', 'begun')
redis.call('HSET', 'cotrain:run:' .. run, 'weights_epoch', weights_epoch, 'rolled_back_to', args.path)
redis.call('HINCRBY', prefix .. 'counters', 'rollbacks', 1)
cut_history(args.tenant, run, args.kept, redis.call('HGET', 'cotrain:weights:' .. args.weights, 'history'))
record_change(prefix, run)
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
return 'OK'
