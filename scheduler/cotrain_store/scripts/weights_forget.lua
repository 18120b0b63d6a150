-- weights_forget: delete the record of weights, unless they are referenced again, or unstored with a name.
-- Fenced by the worker's epoch. LAST: no other weights have their content.
-- needs: fence, weights_in_use
local prefix, ref = args.prefix, args.ref
local weights = 'cotrain:weights:' .. ref

local row = redis.call('HMGET', weights, 'digest', 'worker', 'optimizer', 'checkpoint')
if not row[1] or row[4] or in_use(ref) then
  return 'KEPT'
end
redis.call('DEL', weights, weights .. ':users')
redis.call('SREM', prefix .. 'weights', ref)
redis.call('ZREM', prefix .. 'released', ref)
redis.call('SREM', prefix .. 'external', args.folder)
if row[1] == '' then
  redis.call('SREM', prefix .. 'unstored:' .. row[2], ref)
  return 'KEPT'
end
if row[3] and row[3] ~= '' then
  redis.call('SREM', prefix .. 'optimizer:' .. row[3], ref)
end
local content = prefix .. 'content:' .. row[1]
redis.call('SREM', content, ref)
return redis.call('EXISTS', content) == 0 and 'LAST' or 'SHARED'
